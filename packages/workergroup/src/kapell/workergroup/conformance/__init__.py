# ruff: noqa: F403 - the tests themselves are the module's content
"""Tests that every backend passes. A backend's own test file imports them; two fixtures say what to test.

```python
import pytest
from kapell.workergroup import load_backend
from kapell.workergroup.conformance import *

@pytest.fixture(scope="module")
def backend():
    with load_backend("mine")() as backend:
        yield backend

@pytest.fixture
def lose_worker():
    return lambda group, rank: ...  # end the process of one worker of the group
```

The fixtures may as well be in ``conftest.py``, where
``pytest.register_assert_rewrite("kapell.workergroup.conformance")`` makes failures speak. A worker that is busy can be
lost too. Needs pytest (extra ``conformance``) and nothing else; groups are few, since starting one may take seconds.
"""

from .calls import *
from .colocation import *
from .errors import *
from .fixtures import *
from .lifecycle import *
from .modes import *
from .views import *
