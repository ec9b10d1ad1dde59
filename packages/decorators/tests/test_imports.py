"""The package costs its importer nothing but the standard library."""

import subprocess
import sys

HEAVY = ("numpy", "torch", "ray", "tensordict", "pandas", "transformers")


def test_importing_the_package_imports_no_library():
    code = f"import sys, kapell.decorators; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_labelling_splitting_and_planning_import_no_library():
    code = f"""
import sys
from kapell.decorators import *
@register(Dispatch.DP_COMPUTE_PROTO)
def double(self, rows): return rows
plan = make_plan("double", spec_of(double), GroupShape(2), ([1, 2, 3],))
assert plan.collect([plan.call_for(rank)[0][0] for rank in range(2)]) == [1, 2, 3]
str(plan)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists():
    import kapell.decorators

    assert sorted(set(kapell.decorators.__all__)) == sorted(kapell.decorators.__all__)
    assert all(hasattr(kapell.decorators, name) for name in kapell.decorators.__all__)
