"""Tests of the engine and of the book."""
