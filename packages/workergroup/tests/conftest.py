import pytest

pytest.register_assert_rewrite("kapell.workergroup.conformance")
