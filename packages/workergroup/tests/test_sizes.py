"""Weighing an argument costs little, whatever it is."""

from kapell.workergroup.sizes import size_of


def test_few_entries_are_all_weighed_and_many_by_the_first():
    assert size_of({"a": b"x", "b": [b"x" * 1000, (b"y" * 10,)]}) == 1 + 1 + 1 + 1000 + 10
    assert size_of([b"xy"] * 1000) == 2000


def test_values_inside_themselves_and_deep_ones_end():
    inside = {"name": "a"}
    inside["self"] = inside
    deep = many = []
    for _ in range(5000):
        deep = [deep]
        many = [many, many]
    long = [0] * 100
    long[0] = long
    assert size_of(inside) >= len("name") + 1
    assert size_of(deep) == size_of(many) == size_of(long) == 0
