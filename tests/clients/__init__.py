"""Clients that people use, against one server; each test is skipped where its client is missing."""
