"""Who writes and reads each column, as a table and as diagrams."""

import os
import re
import shutil
import subprocess
from functools import cache
from xml.etree import ElementTree

import pytest
from PIL import Image

from kapell.trainer.cli import main
from kapell.trainer.column_chart import column_chart
from kapell.trainer.config_load import load_config
from kapell.trainer.explain import explain_columns, mermaid

PPO = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true")
SVG = "{http://www.w3.org/2000/svg}"


@cache
def flow(*overrides):
    return explain_columns(load_config(overrides=overrides).config)


def column(found, name):
    return next(column for column in found.columns if column.name == name)


def test_each_column_has_its_writer_and_its_readers_with_the_workers_methods():
    values = column(flow(*PPO), "values")
    assert values.writers == {"values": "critic.compute_values"}
    assert values.readers == {"adv": "", "update_critic": "critic.update", "metrics": ""}
    reference = column(flow(*PPO), "ref_log_prob")
    assert reference.writers == {"ref": "actor_rollout_ref.compute_ref_log_prob"}
    assert reference.readers == {"update_actor": "actor_rollout_ref.update"}


def test_columns_of_the_data_come_from_no_stage():
    assert column(flow(), "ground_truth").writers == {"data": ""}
    assert column(flow(), "raw_prompt").readers == {}


def test_what_an_algorithm_does_not_use_is_not_there():
    names = {column.name for column in flow().columns}
    assert not names & {"values", "ref_log_prob"}
    assert "values" not in flow().actors


def test_readers_follow_the_configuration():
    in_bypass = flow("algorithm.rollout_correction.bypass_mode=true")
    assert column(in_bypass, "rollout_log_probs").readers.keys() >= {"old_log_prob"}
    assert "old_log_prob" not in column(flow(), "rollout_log_probs").readers


def test_the_mermaid_diagram_has_an_arrow_for_each_writer_and_reader():
    found = flow(*PPO)
    text = mermaid(found)
    assert text.startswith("flowchart TD\n")
    nodes = dict(re.findall(r'^    (s\d+)\["(\w+)', text, re.MULTILINE))
    assert list(nodes.values()) == list(found.actors)
    arrows = re.findall(r'^    (s\d+) -- "([^"]*)" --> (s\d+)$', text, re.MULTILINE)
    assert len(nodes) + len(arrows) == len(text.splitlines()) - 1
    drawn = {(nodes[a], name, nodes[b]) for a, names, b in arrows for name in names.split("<br/>")}
    wanted = {(w, c.name, r) for c in found.columns for w in c.writers for r in c.readers if w != r}
    assert drawn == wanted


def test_the_picture_has_a_dot_for_each_write_and_each_read_and_loads_nothing():
    found = flow(*PPO)
    text = column_chart(found, title="a < b")
    dots = ElementTree.fromstring(text).findall(f"{SVG}circle/{SVG}title/..")
    writes = sum(len(column.writers) for column in found.columns)
    reads = sum(len(column.readers) for column in found.columns)
    assert [dot.get("class") for dot in dots].count("writes") == writes
    assert [dot.get("class") for dot in dots].count("reads") == reads
    assert {title.text for title in ElementTree.fromstring(text).iter(f"{SVG}title")} >= {
        "values writes values by critic.compute_values"
    }
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in text


def test_a_real_browser_draws_the_picture(tmp_path):
    browser = shutil.which("chromium")
    if browser is None:
        if os.environ.get("KAPELL_TEST_BROWSER") != "required":
            pytest.skip("no chromium here; KAPELL_TEST_BROWSER=required makes this a failure")
        pytest.fail("KAPELL_TEST_BROWSER=required, but there is no chromium")
    page, picture = tmp_path / "columns.svg", tmp_path / "columns.png"
    page.write_text(column_chart(flow(*PPO), title="columns"))
    options = ["--headless=new", "--disable-gpu", "--no-sandbox", "--window-size=1600,900"]
    subprocess.run(
        [browser, *options, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", page.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
    )
    with Image.open(picture) as image:
        colors = image.convert("RGB").getcolors(maxcolors=2**24) or []
    blue = sum(count for count, (red, green, b) in colors if b > 180 and red < 90 and green < 140)
    assert blue > 20 * len(flow(*PPO).columns)  # the dots of the writers


def test_the_command_prints_the_table_or_the_diagram_and_writes_the_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kapell.trainer.explain.explain_columns", lambda config: flow(*PPO))
    main(["explain", *PPO])
    shown = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert " values values* adv, update_critic*, metrics " in shown
    assert "critic.compute_values" in shown
    main(["explain", *PPO, "--mermaid"])
    assert capsys.readouterr().out == mermaid(flow(*PPO))
    main(["explain", *PPO, "--svg", str(tmp_path / "columns.svg")])
    assert "Columns of one step with algorithm.adv_estimator=gae" in (tmp_path / "columns.svg").read_text()
    with pytest.raises(SystemExit) as caught:
        main(["explain", *PPO, "--svg", str(tmp_path / "nowhere" / "columns.svg")])
    assert caught.value.code == 2
