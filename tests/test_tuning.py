"""The search for tiles, the tables that it leaves, and what kernels take from them."""

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.errors import OutOfResources

from minisgl.benchmark import tune, tune_steps
from minisgl.benchmark.tuning import GAIN, choices, search
from minisgl.kernels import device, fp8_linear, linear
from minisgl.kernels.device import H200, DeviceLimits, TunedTiles, load_tuned, tile_files
from minisgl.kernels.linear import Tiling
from minisgl.kernels.norm import DeferredNorm
from tests.fused_cases import check_model, small_model

ON_CPU = {"device": "cpu", "dtype": torch.float32}
SHIPPED = sorted((Path(device.__file__).parent / "tiles").glob("*.json"))
STORED = Path(__file__).parents[1] / "notebooks" / "data" / "tiles"


def rounds(tiles):
    """The same choices for every key."""
    return lambda key: tiles


times = st.lists(st.one_of(st.none(), st.floats(1, 100)), min_size=1, max_size=4)


@given(rules=st.dictionaries(st.sampled_from("abcd"), st.floats(1, 100), min_size=1),
       choice=st.dictionaries(st.sampled_from("abcd"), times))  # fmt: skip
def test_a_search_finds_the_best_of_what_can_run(rules, choice):
    tuned = TunedTiles()

    def measure():
        total = 0.0
        for key, rule in rules.items():
            found = tuned.find(key)
            seconds = rule if found is None else choice[key][found[0]]
            if seconds is None:
                raise OutOfResources(300_000, 232_448, "shared memory")
            total += seconds
        return total

    found = search(tuned, lambda key: [[i] for i in range(len(choice.get(key, ())))], measure)
    assert dict(tuned) == found
    after = measure()  # everything left can run
    best = sum(min([rule, *(t for t in choice.get(key, ()) if t)]) for key, rule in rules.items())
    assert after <= sum(rules.values())
    assert after <= best * (1 + GAIN) ** 4 + GAIN * 4 * sum(rules.values())


def test_an_entry_has_to_beat_the_rule_again():
    tuned, seconds = TunedTiles(), iter([10.0, 9.0])  # a lucky first look, and the truth afterwards
    assert search(tuned, rounds([[1]]), lambda: (tuned.find("a"), next(seconds, 10.0))[1]) == {}
    assert not tuned


def test_entries_that_are_there_are_left_alone():
    tuned = TunedTiles({"a": [7]})
    assert search(tuned, rounds([[1]]), lambda: 9.0 if tuned.find("a") == [1] else 10.0) == {}
    assert tuned == {"a": [7]}


def test_kernels_take_what_was_found():
    tuned = TunedTiles({
        "rows plain 16 4096 1024": [16, 32, 64, 2, 8, True, 1],
        "rows split 64 1024 2048": [],
        "row norm_plain 0 4096 1024": [8, 512, 4, 1],
        "rows8 gated 16 3072 1024": [16, 64, 64, 2, 6, True, 1],
        "rows8 plain 16 6144 4096": [16, 32, 256, 2, 4, True, 1],
        "rows plain 512 4096 1024": [64, 32, 64, 2, 8, True, 1],
    })  # fmt: skip
    limits = DeviceLimits(132, 232_448, 90, tuned)
    plain = {"gated": False, "split_k": False}
    for m in (2, 8, 16):
        assert linear.choose_tiling(m, 4096, 1024, **plain, limits=limits) == Tiling(
            16, 32, 64, 2, 8, True
        )
    for m in (17, 300):
        rule = linear.choose_tiling(m, 4096, 1024, **plain)
        assert linear.choose_tiling(m, 4096, 1024, **plain, limits=limits) == rule
    split = {"gated": False, "split_k": True}
    assert linear.choose_tiling(48, 1024, 2048, **split, limits=limits) is None
    assert linear.choose_tiling(48, 1024, 2048, **split) is not None
    choose, of = linear.choose_gemv_block, (4096, 1024)
    assert choose(*of, True, False, 0, limits) == (8, 512, 4, 1)
    assert choose(*of, False, False, 0, limits) == choose(*of, False, False)
    gated = {"gated": True, "split_k": False}
    assert fp8_linear.choose_fp8_tiling(9, 3072, 1024, **gated, limits=limits).bn == 64
    deep = fp8_linear.choose_fp8_tiling(9, 6144, 4096, **plain, limits=limits)
    assert deep == fp8_linear.choose_fp8_tiling(9, 6144, 4096, **plain)  # a scale for 128 columns
    assert tuned.asked >= set(tuned) - {"rows plain 512 4096 1024"}


def test_products_are_cut_as_the_table_says(monkeypatch):
    """Through the functions that a model calls, not only the choice."""
    tuned = TunedTiles({
        "rows plain 16 128 1024": [16, 32, 64, 2, 2, True, 1],
        "rows8 plain 16 128 1024": [16, 16, 64, 2, 2, True, 1],
        "row norm_plain 0 128 1024": [1, 512, 4, 1],
        "row plain 1 128 1024": [2, 512, 4, 16],
    })  # fmt: skip
    vars(H200).update(tuned=tuned)  # frozen, and what kernels on a CPU are cut for
    seen = []
    real = linear.launch_few_row_gemm
    try:
        for module in (linear, fp8_linear):
            monkeypatch.setattr(
                module, "launch_few_row_gemm", lambda *a: (seen.append(a[3]), real(*a))[1]
            )
        x, w = torch.randn(9, 1024), torch.randn(128, 1024)
        assert (linear.linear(x, w) - x @ w.T).abs().max() < 1e-3
        eight = tune_steps.random_weight(128, 1024, eight_bits=True, on=ON_CPU)
        want = x @ eight.dequantized(torch.float32).T
        assert (linear.linear(x, eight) - want).abs().max() < 1e-3
        assert [one.bn for one in seen] == [32, 16]
        y = linear.gemv(DeferredNorm(x[:1], x[:1], x[0].square()), w)
        assert (y - torch.nn.functional.rms_norm(x[:1], (1024,)) @ w.T).abs().max() < 1e-3
        linear.gemv(x[:1], eight)
        assert tuned.asked >= set(tuned)
    finally:
        vars(H200).update(tuned=TunedTiles())


def test_tiles_of_this_machine_go_before_the_shipped_ones(tmp_path, monkeypatch):
    paths = tmp_path / "shipped.json", tmp_path / "own.json"
    monkeypatch.setattr(device, "tile_files", lambda gpu: paths)
    assert load_tuned("Some GPU") == {}
    a, b, c = (f"row plain 0 {n} 1024" for n in (64, 128, 256))
    one, two = [2, 512, 4, 1], [4, 1024, 4, 1]
    paths[0].write_text(json.dumps({"tiles": {a: one, b: one}}))
    tune.keep(paths[1], [{"found": {b: two}}], "a command")
    assert load_tuned("Some GPU") == {a: one, b: two}
    tune.keep(paths[1], [{"found": {c: two}}], "another")
    assert load_tuned("Some GPU") == {a: one, b: two, c: two}
    assert len(json.loads(paths[1].read_text())["rows"]) == 2


BROKEN = [
    "", "{", "[]", '{"tiles": 3}', '{"tiles": {"a": 1}}', "{}",
    *(json.dumps({"tiles": {key: tiles}}) for key, tiles in (
        ("rows plain 16 4096 1024", [16, 48, 64, 4, 4, True, 1]),  # 48 does not divide 4096
        ("rows plain 16 4096 1024", [16, 64]), ("rows plain 16 4096 1024", [16, 0, 64, 4, 4, 1, 1]),
        ("row plain 0 4096 1024", [4, 300, 4, 1]), ("row plain 0 4096 1024", []),
        ("row plain 0 4096 1024", ["4", "512", 4, 1]),
    )),
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_stops_nothing(tmp_path, monkeypatch, text):
    broken = tmp_path / "own.json"
    monkeypatch.setattr(device, "tile_files", lambda gpu: (tmp_path / "none", broken))
    broken.write_text(text)
    with pytest.warns(UserWarning, match=r"own\.json is ignored"):
        assert load_tuned("Some GPU") == {}


def test_files_bear_the_name_of_the_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped, own = tile_files("NVIDIA H100 80GB HBM3")
    assert shipped.exists() and own == tmp_path / "minisgl/tiles/NVIDIA_H100_80GB_HBM3.json"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tiles_are_the_stored_ones_and_divide_their_weights(path):
    tiles = json.loads(path.read_text())["tiles"]
    assert tiles and tiles == json.loads((STORED / path.name).read_text())["tiles"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_tuned(path.stem.replace("_", " ")) == tiles
    for key, found in tiles.items():
        assert found in list(choices(key, H200)), key


def smaller(key):
    """The key of a weight as small as its tiles allow, for the interpreter."""
    kernel, kind, first, *_ = key.split()
    return " ".join([kernel, kind, first, "256" if kernel != "row" else "128", "4096"])


KERNELS = sorted({(smaller(key), tuple(tiles)) for path in SHIPPED
                  for key, tiles in json.loads(path.read_text())["tiles"].items()
                  if tiles})  # fmt: skip


@pytest.mark.parametrize(("key", "tiles"), KERNELS)
def test_shipped_tiles_compute_the_product(key, tiles):
    kernel, kind, first, n, k = key.split()
    if kernel == "row" and 4096 % tiles[1]:
        k = str(tiles[1] * 2)
    product, want = tune_steps.trial_of(" ".join([kernel, kind, first, n, k]), ON_CPU)
    assert tune_steps.is_right(product, want, list(tiles))


@pytest.mark.parametrize("key", [
    "row norm_gated 0 128 1024", "row plain 1 128 2048", "rows split 16 128 512",
    "rows gated 32 128 512", "rows8 plain 16 128 512",
])  # fmt: skip
def test_a_wrong_product_is_no_choice(key):
    product, want = tune_steps.trial_of(key, ON_CPU)
    tiles = next(iter(choices(key, H200)))
    assert tune_steps.is_right(product, want, tiles)
    assert not tune_steps.is_right(product, want + want.abs().mean(), tiles)


def test_what_cannot_run_is_no_choice():
    def product(tiles):
        raise OutOfResources(300_000, 232_448, "shared memory")

    assert not tune_steps.is_right(product, torch.ones(1), [1])


@pytest.mark.parametrize("key", ["rows8 plain 16 128 512", "rows8 gated 32 128 512"])
def test_choices_suit_weights_with_a_scale_for_128_columns(key):
    assert all(tiles[2] <= 128 for tiles in choices(key, H200))


def test_an_interrupted_search_leaves_the_table_as_it_was():
    tuned = TunedTiles()

    def measure():
        if tuned.find("a"):
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        search(tuned, rounds([[1]]), measure)
    assert not tuned


def test_several_may_keep_at_the_same_time(tmp_path):
    path = tmp_path / "own.json"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: tune.keep(path, [{"found": {str(i): []}}], "one"), range(24)))
    assert len(json.loads(path.read_text())["tiles"]) == 24


def test_ranks_that_cannot_share_a_model_are_refused():
    with pytest.raises(ValueError, match="3"):
        tune_steps.config_of("Qwen/Qwen3-8B", 3)
    assert tune_steps.config_of("Qwen/Qwen3-30B-A3B", 8)["num_key_value_heads"] == 1


def test_one_rank_is_a_model_of_its_own():
    cut = tune_steps.config_of("Qwen/Qwen3-32B", 2)
    assert (cut["num_attention_heads"], cut["num_key_value_heads"]) == (32, 4)
    assert (cut["intermediate_size"], cut["num_hidden_layers"], cut["head_dim"]) == (12800, 8, 128)


@pytest.mark.parametrize("tp", [1, 2])
def test_one_row_meets_the_kernels_of_so_many_ranks(tp):
    """Behind a sum over ranks, no product is behind a norm whose factor is missing."""
    H200.tuned.asked.clear()
    comm = tune_steps.SkippedAllReduce(tp)
    check_model(small_model("qwen3", comm=comm, num_hidden_layers=1), [9], None)
    asked = {key.split()[1] for key in H200.tuned.asked}
    assert "plain" in asked and ("norm_plain" in asked) == (tp == 1)


def test_the_command_says_what_it_needs(capsys):
    with pytest.raises(SystemExit) as stop:
        tune.main(["--help"])
    assert stop.value.code == 0 and "--batch-sizes" in capsys.readouterr().out
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as stop:
            tune.main(["Qwen/Qwen3-0.6B"])
        assert stop.value.code == 2 and "NVIDIA GPU" in capsys.readouterr().err
