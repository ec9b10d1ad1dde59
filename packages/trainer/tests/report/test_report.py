"""The page about a run: complete, self-contained, safe with any text, and fit to be looked at in a real browser."""

import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from PIL import Image

from kapell.trainer.cli import main
from kapell.trainer.report import load_run, render_report, write_report
from kapell.trainer.report.charts import Series, line_chart, stacked_bars, ticks, tidy
from kapell.trainer.report.timing import stage_seconds, time_by_role

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'


@pytest.fixture
def run_folder(tmp_path):
    def make(name="run-a", *, steps=30, seed=7, hostile=False):
        folder = tmp_path / name
        folder.mkdir()
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(steps + 1):
                record = {"step": step}
                if step:
                    record |= {
                        "critic/score/mean": 1 - math.exp(-step / 10),
                        "actor/entropy": 2.5 - step / 20,
                        "actor/grad_norm": None if step == 3 else 0.5,
                        "perf/throughput": 1000.0 + step,
                        "my/own": step % 3,
                        "timing_s/step": 1.0,
                        "timing_s/gen": 0.25,
                        "timing_s/update_actor": 0.5,
                        "timing_s/old_log_prob": 0.05,
                        "timing_s/adv": 0.001,
                    }
                if step % 10 == 0:
                    record |= {"val/exact_match": step / steps, "val/score/mean": 0.5, "timing_s/testing": 0.1}
                file.write(json.dumps(record) + "\n")
        with (folder / "samples.jsonl").open("w") as file:
            for step in range(0, steps + 1, 10):
                for uid in range(3):
                    text = HOSTILE if hostile else f"answer {uid}"
                    sample = {"step": step, "uid": str(uid), "prompt": f"question {uid}", "response": text}
                    score = {"ground_truth": "t", "score": float(uid == 1), "exact_match": float(uid == 1)}
                    file.write(json.dumps({**sample, **score}) + "\n")
        config = {
            "algorithm": {"adv_estimator": "grpo"},
            "trainer": {"seed": seed, "nnodes": 1, "n_gpus_per_node": 2, "total_training_steps": steps},
            "backend": {"name": "local", "options": {}},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "config_origins.yaml").write_text(yaml.safe_dump({"trainer.seed": "command line"}))
        return folder

    return make


class Page(HTMLParser):
    """What a browser would see: open tags, texts, and everything that could load something."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.loads, self.words = [], [], [], []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_greedy_responses_are_time_of_the_rollout():
    rows = time_by_role({"gen": [1.0, 1.0], "gen_max": [2.0, 1.0], "adv": [0.5, 0.5]})
    assert [(row.role, row.stage, row.seconds) for row in rows] == [
        ("rollout", "", 5.0),
        ("rollout", "gen_max", 3.0),
        ("rollout", "gen", 2.0),
        ("controller", "", 1.0),
    ]


def test_the_page_has_all_parts_and_loads_nothing(run_folder):
    html = render_report([load_run(run_folder())])
    page = Page(html)
    assert all(target.startswith("#") for target in page.loads)
    assert not re.search(r"https?://|@import|url\(", html)
    for part in ("run-a", "30 steps", "grpo", "2 workers on local", "Curves", "Timing", "Configuration", "from 0.0%"):
        assert part in page.text
    for part in ("question 0", "answer 2", "step 10", "my/own", "trainer.seed 7 command line", "update_actor"):
        assert part in page.text
    assert page.tags.count("svg") >= 6


def test_text_of_the_run_cannot_become_markup(run_folder):
    html = render_report([load_run(run_folder(hostile=True))])
    page = Page(html)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert HOSTILE in page.text
    folder = run_folder("b<i>r", steps=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, '"><script>': 1.0}) + "\n")
    assert Page(render_report([load_run(folder)])).tags.count("script") == 1


def test_two_runs_are_compared_and_their_differences_come_first(run_folder):
    html = render_report([load_run(run_folder("one", seed=7)), load_run(run_folder("two", seed=8, steps=20))])
    page = Page(html)
    assert "Solid: one . Dashed: two" in page.text.replace("Solid: one.", "Solid: one .")
    assert "critic/score/mean (two)" in page.text
    differing = re.findall(r'<tr class="differs"><td><code>(.*?)</code>', html)
    assert differing == ["trainer.seed", "trainer.total_training_steps"]


def test_one_or_two_runs_fit_on_a_page(run_folder):
    run = load_run(run_folder())
    for runs in ([], [run, run, run]):
        with pytest.raises(ValueError, match="one run or two"):
            render_report(runs)


def test_a_run_without_samples_configuration_or_timing_still_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    page = Page(render_report([load_run(tmp_path)]))
    assert "loss" in page.text
    assert "Responses of validation" not in page.text


def test_a_run_that_was_killed_in_a_line_can_be_read(run_folder):
    folder = run_folder()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "critic/sc')
    assert load_run(folder).records[-1]["step"] == 30


def test_a_run_without_steps_and_a_folder_without_a_run_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        load_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no steps yet"):
        render_report([load_run(tmp_path)])


def test_values_that_are_no_numbers_are_left_out_of_curves(run_folder):
    run = load_run(run_folder(steps=5))
    assert [step for step, _ in run.points("actor/grad_norm")] == [1, 2, 4, 5]


def test_time_is_gathered_by_role_and_what_no_stage_took_is_the_rest(run_folder):
    steps, stages = stage_seconds(load_run(run_folder(steps=10)))
    assert steps == list(range(1, 11))
    assert sum(stages["rest"]) == pytest.approx(10 * (1.0 - 0.25 - 0.5 - 0.05 - 0.001))
    rows = {(row.role, row.stage): row.seconds for row in time_by_role(stages)}
    assert rows["actor", ""] == pytest.approx(5.5)
    assert rows["actor", "update_actor"] == pytest.approx(5.0)
    assert rows["rollout", ""] == pytest.approx(2.5)
    assert ("rollout", "gen") not in rows
    assert rows["validation", ""] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "values",
    [[0.0], [5.0, 5.0], [0.0] * 100, [-1e-9, 1e9], [1e-12, 2e-12], [1e-16, 3e-16], [1 - 1e-16, 1.0], list(range(5000))],
)
def test_charts_of_any_values_stay_within_their_frame(values):
    svg = line_chart([Series("a", list(enumerate(values)), 1)], "a")
    drawn = re.findall(r'(?:d="M|cx=")([-\d.]+)(?: |" cy=")([-\d.]+)', svg)
    assert drawn
    assert all(0 <= float(x) <= 400 and 0 <= float(y) <= 230 for x, y in drawn)
    assert len(svg) < 60_000
    bars = stacked_bars(list(range(len(values))), {"a": [abs(value) for value in values]}, {"a": 1}, "a")
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([-\d.]+)"', bars)]
    assert all(0 <= height <= 230 for height in heights)
    assert len(heights) <= 80


def test_ticks_are_round_and_cover_the_values():
    assert ticks(0.13, 0.87) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 0) == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert tidy(-0.5) == "-0.5"


def test_the_command_writes_the_page_and_says_where(run_folder, capsys):
    folder = run_folder()
    main(["report", str(folder)])
    assert f"wrote {folder}/report.html" in capsys.readouterr().out.replace("\n", "")
    main(["report", str(folder), str(run_folder("other")), "--output", str(folder / "deep" / "both.html")])
    assert "run-a and other" in (folder / "deep" / "both.html").read_text()
    with pytest.raises(SystemExit):
        main(["report", str(folder / "nowhere")])


def _browser():
    found = shutil.which("chromium")
    if found is None and os.environ.get("KAPELL_TEST_BROWSER") != "required":
        pytest.skip("no chromium here: `apt-get install chromium`; KAPELL_TEST_BROWSER=required makes this a failure")
    assert found is not None, "KAPELL_TEST_BROWSER=required, but there is no chromium"
    return found


@pytest.mark.parametrize("runs", [1, 2])
def test_a_real_browser_shows_the_page(run_folder, tmp_path, runs):
    browser = _browser()
    folders = [run_folder("one"), run_folder("two", seed=8)][:runs]
    page = write_report(folders, tmp_path / "report.html")
    picture = tmp_path / "page.png"
    options = ["--headless=new", "--disable-gpu", "--no-sandbox", "--hide-scrollbars", "--window-size=1360,2400"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    log = subprocess.run(
        [browser, *options, profile, "--enable-logging=stderr", f"--screenshot={picture}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stderr
    assert "CONSOLE" not in log, "the page's script reports an error"
    with Image.open(picture) as image:
        assert image.size == (1360, 2400)
        colors = image.convert("RGB").getcolors(maxcolors=2**24) or []
        blue = sum(count for count, (red, green, b) in colors if b > 180 and red < 90 and green < 140)
    assert len(colors) > 100
    assert blue > 1000  # lines and bars are drawn, in the style sheet's colours
    assert Path(picture).stat().st_size > 30_000
