"""The report of a run: what it reads, what it draws, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rlite.report import read_run, write_report
from rlite.report.charts import Series, line_chart, show, smoothed, stacked_chart, thin, ticks
from rlite.report.run import read_metrics


def sample(step: int, index: int, reward: float | None, **changes: Any) -> dict[str, Any]:
    line = {
        "rollout_step": step,
        "uid": index,
        "sample": 0,
        "prompt": f"question {index}",
        "completion": f"answer {index}",
        "finish_reason": "stop",
        "num_tokens": 3,
        "rewards": {"exact_match": reward},
        "reward": reward,
        "advantage": 0.5,
        "logprob_diff": 1e-6 * index,
    }
    return line | changes


def make_run(directory: Path, samples: list[dict[str, Any]] | None = None) -> Path:
    """Three rollout steps, a validation after the second, columns as a run writes them."""
    header = "reward/mean,timing_s/generate,timing_s/update,timing_s/step,perf/phase/train/device_peak_bytes,"
    header += "rollout/logprob_diff_max,val/reward/mean,rollout_step,step,epoch"
    rows = [
        "0.25,1.0,2.0,4.0,1048576,1e-5,,0,1,0",
        "0.5,1.0,2.0,4.0,1048576,2e-5,,1,2,0",
        ",,,,,,0.75,,2,0",
        "nan,1.0,2.0,4.0,1048576,0.0,,2,3,0",
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.csv").write_text("\n".join([header, *rows]) + "\n")
    if samples is not None:
        (directory / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    return directory


def test_page_is_one_well_formed_file_that_loads_nothing(tmp_path):
    run = make_run(tmp_path / "name" / "run", [sample(0, 1, 1.0)])
    (run / "config.yaml").write_text("model: <b>\n")
    path = write_report(run)
    page = path.read_text()
    assert path == run / "report.html"
    assert "<script" not in page and "http" not in page and not re.search(r"\b(src|href)=", page)
    body = page[page.index("<body>") : page.index("</html>")]
    ElementTree.fromstring(body)  # every tag is closed
    assert "name / run" in page and "model: &lt;b&gt;" in page
    assert page.count("<svg") == 4, "reward, mismatch, seconds, device memory: charts of what was logged, no others"


def test_a_trace_of_the_run_is_linked(tmp_path):
    run = make_run(tmp_path)
    assert "trace.json" not in write_report(run).read_text()
    (run / "trace.json").write_text("{}")
    assert '<a href="trace.json" download>' in write_report(run).read_text()


def test_what_models_wrote_is_escaped(tmp_path):
    attack = "</pre><script>alert(1)</script>"
    lines = [sample(0, 1, 1.0, prompt=attack), sample(0, 2, 0.0, completion=attack, rewards={attack: 1.0, "b": None})]
    page = write_report(make_run(tmp_path, lines)).read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") >= 3


def test_best_and_worst_are_of_the_last_step_and_of_different_prompts(tmp_path):
    lines = [sample(0, 9, 100.0, logprob_diff=0.5)]
    lines += [sample(1, index, float(index)) for index in range(6)] + [sample(1, 5, 4.5, completion="again")]
    lines += [sample(1, 7, None)]
    samples = read_run(make_run(tmp_path, lines), num_samples=2).samples
    assert samples is not None and (samples.step, samples.total) == (1, 9)
    assert [s["reward"] for s in samples.best] == [5.0, 4.0]
    assert [s["reward"] for s in samples.worst] == [0.0, 1.0]
    assert [s["uid"] for s in samples.strangest] == [9, 7]


def test_last_line_of_a_killed_run_is_left_out_and_others_must_be_whole(tmp_path):
    run = make_run(tmp_path, [sample(0, 1, 1.0)])
    with (run / "samples.jsonl").open("a") as file:
        file.write('{"rollout_step": 0, "pro')
    assert read_run(run).samples.total == 1
    (run / "samples.jsonl").write_text('{"rollout_step": 0\n' + json.dumps(sample(0, 1, 1.0)) + "\n")
    with pytest.raises(ValueError, match=r"samples\.jsonl:1: not JSON"):
        read_run(run)
    (run / "samples.jsonl").write_text('{"rollout_step": 0, "prompt": "a", "completion": "b"}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl:1: 'reward' is missing"):
        read_run(run)


def test_validation_belongs_to_the_step_before_it(tmp_path):
    metrics = read_metrics(make_run(tmp_path) / "metrics.csv")
    assert metrics["val/reward/mean"] == [(1.0, 0.75)]
    assert metrics["reward/mean"] == [(0.0, 0.25), (1.0, 0.5)], "NaN is not drawn"
    assert "step" not in metrics and "rollout_step" not in metrics


def test_directories_that_are_no_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        write_report(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no metrics\.csv in it"):
        write_report(tmp_path)
    make_run(tmp_path / "20260101-120000")
    with pytest.raises(ValueError, match="holds several runs, report one of them: 20260101-120000"):
        write_report(tmp_path)
    (tmp_path / "metrics.csv").write_text("reward/mean,rollout_step\n")
    with pytest.raises(ValueError, match="not finished its first rollout step"):
        write_report(tmp_path)


def _path_points(svg: str, name: str) -> list[tuple[float, float]]:
    path = re.search(rf'class="{name}" d="M([^"]*)"', svg)
    assert path is not None
    return [tuple(map(float, point.split(","))) for point in path[1].rstrip("Z").split("L")]


def test_line_runs_from_left_to_right_and_rises_with_the_values():
    points = _path_points(line_chart([Series(name="a", points=[(0, 1.0), (5, 2.0), (10, 5.0)])]), "line c0")
    assert [x for x, _ in points] == [62.0, 304.0, 546.0]
    heights = [220.0 - y for _, y in points]
    assert heights == sorted(heights) and (heights[1] - heights[0]) * 3 == pytest.approx(heights[2] - heights[1], abs=1)


def test_log_axis_puts_equal_factors_at_equal_distances():
    svg = line_chart([Series(name="a", points=[(0, 1e-6), (1, 1e-5), (2, 0.0), (3, 1e-4)])], log=True)
    a, b, c = (y for _, y in _path_points(svg, "line c0"))
    assert a - b == pytest.approx(b - c, abs=0.2), "zero has no place on it"


def test_layers_stand_on_each_other():
    layers = [Series(name="a", points=[(0, 1.0), (1, 1.0)]), Series(name="b", points=[(0, 2.0), (1, 3.0)])]
    svg = stacked_chart(layers, unit=" s")
    first, second = _path_points(svg, "c0 layer"), _path_points(svg, "c1 layer")
    assert first[:2] == second[:-3:-1], "the top of one is the bottom of the next"
    assert "step 1: b 3 s" in svg and ">4 s<" in svg


def test_nothing_to_draw_is_no_chart():
    assert line_chart([Series(name="a", points=[])]) == ""
    assert line_chart([Series(name="a", points=[(0, 0.0), (1, 0.0)])]) == ""
    assert stacked_chart([Series(name="a", points=[])]) == ""
    assert "<circle" in line_chart([Series(name="a", points=[(0, 3.0)])]), "one point is a dot"


def test_long_series_are_thinned_to_means_and_smoothing_starts_unbiased():
    points = [(float(x), float(x % 2)) for x in range(1000)]
    thinned = thin(points, most=250)
    assert len(thinned) == 250 and {y for _, y in thinned} == {0.5}
    assert thin(points[:10]) == points[:10]
    assert all(y == pytest.approx(7.0) for _, y in smoothed([(x, 7.0) for x in range(100)]))


def test_ticks_and_numbers_are_round():
    assert ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.13, 0.42) == pytest.approx([0.2, 0.3, 0.4])
    assert [show(v) for v in (0, 1.5e-5, 0.1234567, 1234.5, 2e6, -3e-4)] == [
        "0",
        "1.5e-5",
        "0.1235",
        "1234",
        "2e6",
        "-3e-4",
    ]
