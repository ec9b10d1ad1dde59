import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def names(backend):
    """The snippets follow one another, in a Ray that runs already."""
    return {"__name__": "readme"}


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs_and_prints_what_it_says(names, number, capsys):
    snippet = SNIPPETS[number]
    exec(compile(snippet, f"README.md snippet {number}", "exec"), names)
    printed = capsys.readouterr().out
    for promised in re.findall(r"print\(.*\)  # (.*)", snippet):
        if "..." not in promised:
            assert promised.split(":")[0] in printed or promised in printed
