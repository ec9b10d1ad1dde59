"""Settings that the tests of all packages share."""

import os
import signal

from hypothesis import settings

# No test asserts a time, and a loaded machine must not fail one.
settings.register_profile("kapell", deadline=None, max_examples=50, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kapell")

# Tests that import ray before kapell.ray_backend get what the package itself chooses; Ray reads it once.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# A shell starts what is in the background with Ctrl-C ignored, and children inherit that: some tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
