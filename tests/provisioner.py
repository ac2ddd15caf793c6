"""Jupyter kernels as forks; `tests.forks` serves machines without Jupyter, too."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from tests.forks import Forked


class ForkedProvisioner(LocalProvisioner):
    """Starts Jupyter's kernels of Python as forks: 0.1 instead of 4 seconds of a core."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        self.cwd = kwargs.get("cwd") or os.getcwd()
        env = dict(kwargs.get("env") or os.environ)
        env.pop("TRITON_INTERPRET", None)  # a reader has not set it: chapters that need it do
        self.process = Forked("kernel", command=cmd, env=env, folder=str(self.cwd))
        self.pid = self.pgid = self.process.pid
        return self.connection_info

    @classmethod
    def use(cls) -> None:
        """Make it the one that starts all kernels of this process."""
        value = f"{cls.__module__}:{cls.__name__}"
        factory = KernelProvisionerFactory.instance()
        factory.provisioners["forked"] = EntryPoint("forked", value, factory.GROUP_NAME)
        factory.default_provisioner_name = "forked"
