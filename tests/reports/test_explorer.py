"""The explorer: its answers are the simulator's, what can be taken away reproduces them, and other pages get nothing."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import shardyard
from reports.explorer.answers import taken_away
from reports.explorer.app import application
from reports.explorer.form import form
from reports.explorer.guard import LARGEST
from reports.explorer.session import Session
from strategies.plan.plan import Plan
from strategies.planner.advise import advise
from topologies.reading import UserError

ROOT = Path(__file__).parents[2]
GIVEN = {"model": "llama-2-7b", "cluster": "dgx-h100", "nodes": 1}
CHANGES = ["plan.tp=2", "plan.data_parallel=zero1", "plan.sequence_parallel=true", "nodes=2"]
PORT = 8057
ADDRESS = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def page() -> TestClient:
    return TestClient(application(Session(None, GIVEN, ROOT / "examples"), PORT), base_url=ADDRESS)


def ask(page: TestClient, name: str, **body: Any) -> Any:
    answer = page.post(f"/api/{name}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def read(changes: list[str]) -> shardyard.Job:
    return shardyard.read_job(None, changes, **GIVEN)


def test_answers_are_the_simulators(page: TestClient) -> None:
    answer, summary = ask(page, "answer", changes=CHANGES), shardyard.predict(read(CHANGES))
    assert answer["step"] == summary.step_seconds
    assert sum(part["seconds"] for part in answer["breakdown"]) == pytest.approx(answer["step"], rel=1e-9)
    assert [stage["peak"] for stage in answer["memory"]] == [stage.peak for stage in summary.memory]
    assert answer["verdict"].startswith("llama-2-7b on 2 × dgx-h100 (16 GPUs)")


def test_a_job_without_a_plan_begins_with_the_one_that_is_found(tmp_path: Path) -> None:
    session, found = Session(None, GIVEN, tmp_path), shardyard.read_job(**GIVEN)
    session.find_plan()
    assert session.job().hash == found.hash
    assert session.job(["nodes=2"]).plan.data_parallel == found.plan.data_parallel != "ddp"


def test_the_form_has_every_field_of_a_plan_and_begins_with_the_job() -> None:
    controls = [control for section in form(read(CHANGES)) for control in section["controls"]]
    fields = {control["field"] for control in controls}
    assert {f"plan.{name}" for name in Plan.model_fields} <= fields
    stated = {control["field"]: control["value"] for control in controls if control["value"]}
    again = [f"{field}={value}" for field, value in stated.items() if field.startswith("plan.")]
    assert shardyard.read_job(None, again, **GIVEN | {"nodes": 2}).resolve() == read(CHANGES).resolve()


def test_changes_of_a_plan_that_was_found_are_changes_of_this_plan() -> None:
    session = Session(None, GIVEN, ROOT / "examples").settled()
    found = read([])
    assert found.auto is not None
    assert session.job().plan == found.plan
    assert session.job(["plan.clip_gradients=false"]).plan == found.plan.model_copy(update={"clip_gradients": False})


@pytest.mark.parametrize("changes", [[], CHANGES, ["plan.fp8={recipe: delayed}"], ["run.spares=1", "plan.pp=2"]])
def test_what_is_taken_away_reproduces_the_answer(page: TestClient, changes: list[str], tmp_path: Path) -> None:
    if "fp8" in str(changes):
        changes = ["plan.fp8={}", "model=llama-3.1-8b"]
    answer = ask(page, "answer", changes=changes)
    words = shlex.split(answer["take"]["command"])
    printed = CliRunner().invoke(shardyard.main, [*words[1:], "--json"])
    assert json.loads(printed.stdout)["job"]["hash"] == answer["hash"]
    (tmp_path / "job.yaml").write_text(answer["take"]["yaml"])
    assert shardyard.predict(shardyard.read_job(tmp_path / "job.yaml")).step_seconds == answer["step"]
    names: dict[str, Any] = {}
    exec(answer["take"]["python"], names)
    assert names["summary"].step_seconds == answer["step"]


def test_a_change_of_one_field_keeps_the_others_of_its_group(tmp_path: Path) -> None:
    session = Session(str(ROOT / "examples/run-llama-3.1-405b.yaml"), {}, ROOT / "examples")
    changes = ["run.checkpoint.interval=30 min"]
    job = session.job(changes)
    (tmp_path / "job.yaml").write_text(taken_away(session, changes, job)["yaml"])
    assert shardyard.read_job(tmp_path / "job.yaml").run == job.run


def test_a_file_cannot_say_what_only_set_says(page: TestClient) -> None:
    assert ask(page, "answer", changes=["model.layers=12"])["take"]["yaml"] == ""


def test_a_mistake_is_one_line(page: TestClient) -> None:
    for body in ({"changes": ["plan.tp=3"]}, {"changes": "plan.tp=2"}, {"changes": ["tokens=-1"]}, {"changes": ["plan.tpp=2"]}):
        answer = page.post("/api/answer", json=body)
        assert answer.status_code == 422
        assert "\n" not in answer.json()["error"]
    assert page.post("/api/answer", content=b"{", headers={"content-type": "application/json"}).status_code == 422


# -- time


def test_bars_fill_the_window_and_become_finer(page: TestClient) -> None:
    """Seconds of each kind in the bars of the whole step are those in the bars of its halves."""
    changes = ["plan.pp=2", "plan.global_batch=64"]
    whole = ask(page, "timeline", changes=changes)
    step = whole["step"]
    assert step == shardyard.simulate(read(changes)).step
    assert len(whole["rows"]) == 2
    bars = whole["rows"][0]["passes"]
    assert all(0 <= start < end <= step * (1 + 1e-7) for start, end, *_ in bars)  # they are rounded
    eighth = ask(page, "timeline", changes=changes, window=[0, step / 8])
    inside = [bar for bar in bars if bar[0] < step / 8]
    assert len(eighth["rows"][0]["passes"]) >= len(inside) > 2
    assert eighth["window"] == [0, step / 8]


def test_what_happens_over_days_changes_no_step(page: TestClient) -> None:
    usual, spared = (ask(page, "timeline", changes=["plan.pp=2", *more]) for more in ([], ["run.spares=1", "run.pool=4"]))
    assert usual == spared


def test_memory_over_time_is_the_ledgers(page: TestClient) -> None:
    answer = ask(page, "timeline", changes=["plan.pp=2"])
    held = answer["memory"]
    peak = max(sum(sizes[at] for _, _, sizes in held["kinds"]) for at in range(len(held["times"])))
    overhead = next(
        size for kind, size, _ in ask(page, "answer", changes=["plan.pp=2"])["memory"][0]["kinds"] if kind == "overhead"
    )
    assert peak + overhead == pytest.approx(max(stage["peak"] for stage in ask(page, "answer", changes=["plan.pp=2"])["memory"]))


# -- what if, days, search


def test_values_beside_each_other(page: TestClient) -> None:
    points = ask(page, "curve", changes=["plan.tp=2"], field="plan.tp", values=[1, 2, 3, 4])
    assert [point["value"] for point in points] == ["1", "2", "3", "4"]
    assert points[1]["step"] == shardyard.predict(read(["plan.tp=2"])).step_seconds
    assert "does not divide 8 GPUs" in points[2]["error"]


def test_days_with_failures(page: TestClient) -> None:
    days = ask(page, "days", changes=["tokens=1e11", "nodes=4", "plan.data_parallel=zero1"])
    assert sum(part for _, part in days["shares"]) == pytest.approx(1.0)
    assert [label for label, _, _ in days["cards"]][:2] == ["days", "goodput"]


def test_the_usual_ways_are_those_of_advice(page: TestClient) -> None:
    with page.stream("POST", "/api/search", json={"changes": ["plan.global_batch=16"]}) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    best = advise(read(["plan.global_batch=16"]), shardyard.predict).best
    first = lines[-1]["plans"][0]
    assert best is not None
    assert first["name"] == best.name
    assert shardyard.predict(read(["plan.global_batch=16", *first["changes"]])).step_seconds == best.summary.step_seconds
    assert len(lines) > 4


# -- what nobody else may do


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),  # a name that was rebound to this machine
        ({"host": f"evil.example:{PORT}"}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),  # what a form of another page may send without being asked
        ({"content-length": "99999999"}, 413),
    ],
)
def test_requests_of_other_pages_are_refused(page: TestClient, headers: dict[str, str], status: int) -> None:
    usual = {"content-type": "application/json"}
    assert page.post("/api/answer", content=b'{"changes": []}', headers=usual | headers).status_code == status


def test_large_bodies_are_refused_also_when_they_do_not_say_so(page: TestClient) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(2 + LARGEST // 4096):
            yield b" " * 4096

    assert page.post("/api/answer", content=parts(), headers={"content-type": "application/json"}).status_code == 413


def test_nothing_is_loaded_from_elsewhere(page: TestClient) -> None:
    answer = page.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path in (ROOT / "reports/explorer/static").iterdir():
        text = page.get(f"/static/{path.name}").text
        assert "http" not in text.replace("https://github.com/leeoniya/uPlot", "").replace("http://www.w3.org", ""), path.name
    for name in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "nothing.js"):
        assert page.get(f"/static/{name}").status_code == 404


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "secret.yaml").write_text("password: 1")
    (tmp_path / "inside/link.yaml").symlink_to(tmp_path / "secret.yaml")
    session = Session(None, GIVEN, tmp_path / "inside")
    for text in (str(tmp_path / "secret.yaml"), "../secret.yaml", "/etc/hostname", str(tmp_path / "inside/link.yaml")):
        for field in ("model", "cluster", "profile", "plan", "plan.schedule", "run.failures"):
            with pytest.raises(UserError, match="is outside"):
                session.job([f"{field}={text}"])
    for text in ("model=mine.py:build", "model={module: mine.py:build}"):
        with pytest.raises(UserError, match="a module is run when it is read"):
            session.job([text])
    with pytest.raises(UserError, match="more than 200 changes"):
        session.job(["nodes=1"] * 201)


# -- in a browser


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "shardyard.py"), "explore", str(ROOT / "examples/llama-3.1-70b.yaml"), "--no-open"]
    with subprocess.Popen([*command, "--port", str(port)], cwd=ROOT, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        yield f"http://127.0.0.1:{port}/"
        server.terminate()


@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-background-networking"])
        yield launched
        launched.close()


CHANGED_AT_ONCE = """texts => { const slider = document.querySelector(".control:has([id='field-nodes']) input[type=range]");
  for (const text of texts) { slider.value = text; slider.dispatchEvent(new Event("input")); }
  slider.dispatchEvent(new Event("change")); }"""


def test_a_change_is_asked_for_at_once_and_the_last_of_many_next(served: str, browser: Any) -> None:
    """A slider that passes 1, 2, 4 and stays at 16 nodes: its first place is asked for, then the last, none between."""
    tab, asked = browser.new_page(), []
    tab.goto(served)
    tab.wait_for_selector("main[data-ready]")
    tab.on("request", lambda request: asked.append(request.post_data_json["changes"]) if "api/answer" in request.url else None)
    tab.evaluate(CHANGED_AT_ONCE, ["0", "1", "2", "4"])
    tab.wait_for_selector("#verdict >> text=16 × dgx-h100")
    tab.wait_for_selector("main:not(.stale)")
    assert [next(text for text in texts if text.startswith("nodes=")) for texts in asked] == ["nodes=1", "nodes=16"]


def test_a_person_changes_a_job_in_a_browser(served: str, browser: Any) -> None:
    """Changes bring new answers, the address restores them; nothing is asked of other machines, and the console is empty."""
    problems: list[str] = []
    tab = browser.new_page()
    tab.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: None if request.url.startswith((served, "data:")) else problems.append(request.url))
    tab.goto(served)
    tab.wait_for_selector("main[data-ready]")
    first, verdict = tab.get_attribute("main", "data-ready"), tab.inner_text("#verdict")
    assert verdict.startswith("llama-3.1-70b on 8 × dgx-h100")
    assert " s" in tab.inner_text("#cards .card:first-child b")
    assert "(" not in "".join(tab.locator("#cards b").all_inner_texts())  # intervals are below, smaller
    tab.click("#pin")
    tab.locator("[id='field-nodes']").fill("16")
    tab.locator("[id='field-nodes']").press("Tab")
    tab.wait_for_selector(f"main:not([data-ready='{first}'])")
    assert "16 × dgx-h100" in tab.inner_text("#verdict")
    assert tab.url.endswith("#nodes=16")
    assert "as it began" in tab.inner_text("#pinned table")
    tab.select_option("[id='field-plan.recompute']", "full")
    tab.wait_for_selector("#breakdown .legend >> text=recompute")
    address, changed = tab.url, tab.inner_text("#verdict")
    tab.focus("#timeline > canvas")
    for key in ("+", "+", "ArrowRight", "-", "Home"):
        tab.keyboard.press(key)
    box = tab.locator("#timeline > canvas").bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
    tab.wait_for_selector("#timeline .readout >> text=microbatch")
    slider = tab.locator(".control:has([id='field-plan.microbatch']) input[type=range]")
    slider.focus()
    tab.keyboard.press("ArrowRight")
    tab.wait_for_selector("#verdict >> text=tokens")
    assert "plan.microbatch=2" in tab.url
    other = browser.new_page()
    other.goto(address)
    other.wait_for_selector("main[data-ready]")
    assert other.inner_text("#verdict") == changed
    other.locator("[id='field-plan.tp']").fill("3")
    other.locator("[id='field-plan.tp']").press("Tab")
    other.wait_for_selector("#error:not([hidden]) >> text=does not divide")
    assert [problem for problem in problems if "422" not in problem] == []


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        time.sleep(0.05)
        result = CliRunner().invoke(shardyard.main, ["explore", "--port", str(port), "--no-open"])
    assert result.exit_code == 2
    assert f"--port {port}" in result.output
