"""A store that remembers what was fetched from it."""

from kapell.protocol import MemoryStore


class CountingStore(MemoryStore):
    def __init__(self):
        super().__init__()
        self.fetched = []

    def get(self, refs, *, timeout=None):
        self.fetched += refs
        return super().get(refs, timeout=timeout)
