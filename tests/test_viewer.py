"""The viewer's page in a real browser, and what makes the page."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response

from minisgl import LLM, SamplingParams, events
from minisgl.recording import Recorder, read_recording, replay
from minisgl.scheduler.messages import AbortMsg
from minisgl.server.http.access import Access
from minisgl.server.http.errors import ApiError
from minisgl.server.observe import viewer
from minisgl.server.observe.viewer import LivePage, add_viewer_route
from minisgl.viewer.__main__ import main
from minisgl.viewer.page import SOURCES, Viewer, page_in_process, page_of, pair_of
from tests.browser import cpu_clock, faults, whole_cpu_clock
from tests.fakes import Driver

ROOT = Path(__file__).resolve().parents[1]


def record(path: Path, requests: int, steps: int, seed: int = 0, **sizes: Any) -> Path:
    """Record a random history of a scheduler without a model."""
    rng = random.Random(seed)
    recorder = Recorder(path, text=True)
    fields: dict[str, Any] = {"num_pages": 60, "max_running_req": 6, "reserve": 4, "overlap": True}
    driver = Driver(emit=recorder, **{**fields, **sizes})
    pages, rows = driver.engine.num_pages, driver.engine.max_running_req
    about = {"page_size": 4, "num_pages": pages, "rows": rows, "budget": 64}
    recorder.begin({**about, "device": "cpu", "overlap": True, "model": "none"})
    asked = 0
    while driver.scheduler.step_count < steps or driver.scheduler.has_work:
        more = asked < requests and asked * steps <= requests * driver.scheduler.step_count
        if more or not driver.scheduler.has_work:
            prompt = [5] * rng.randrange(20) + [rng.randrange(9) for _ in range(1 + asked % 9)]
            driver.ask(asked, prompt, max_tokens=8 + rng.randrange(60), ignore_eos=True)
            if rng.random() < 0.1:
                driver.channel.put_messages(AbortMsg(rng.randrange(asked + 1)))
            asked += 1
        driver.step()
        if driver.scheduler.step_count >= steps and driver.scheduler.reqs:
            driver.channel.put_messages(*(AbortMsg(uid) for uid in driver.scheduler.reqs))
    recorder.close()
    return path


# ------------------------------------------------------------------------------- without a browser


def test_sources_name_functions_and_chapters_that_exist() -> None:
    kinds = {kind.__name__ for kind in events.Event.__subclasses__()} - {"StageEnded"}
    assert SOURCES.keys() == kinds | {"receive", "schedule", "wait"}
    for function, chapter in SOURCES.values():
        text = (ROOT / "notebooks" / f"{chapter}.md").read_text()
        owner, _, name = function.rpartition(".")
        assert f"def {name}(" in text and (not owner or f"class {owner}" in text), function


def test_page_is_one_file_without_addresses(tmp_path: Path) -> None:
    page = page_of(record(tmp_path / "run", 5, 20))
    assert "http://" not in page and "https://" not in page and "src=" not in page
    assert "import(" not in page and "/* DATA */" not in page
    assert f'"{SOURCES["PagesTaken"][0]}"' in page


def test_frame_holds_the_page_escaped(tmp_path: Path) -> None:
    html = Viewer(record(tmp_path / "run", 3, 5), height=300)._repr_html_()
    assert html.count("<iframe") == 1 and "<script" not in html and "height:300px" in html
    with pytest.raises(ValueError, match="height: must be"):
        Viewer(tmp_path / "run", height=0)


def test_a_pair_takes_two_recordings(tmp_path: Path) -> None:
    one = record(tmp_path / "one.jsonl", 3, 5)
    page = pair_of({"a <b>": one, "its fix": one})
    assert page.count("<iframe") == 2 and "a &lt;b&gt;" in page and "a <b>" not in page
    assert "http://" not in page and "https://" not in page
    with pytest.raises(ValueError, match="runs: must be two recordings"):
        pair_of({"alone": one})
    assert main([str(one), "--beside", str(one), "-o", str(tmp_path / "pair.html")]) == 0
    assert (tmp_path / "pair.html").read_text().count("<iframe") == 2


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "run.jsonl", 3, 5)
    assert main([str(run)]) == 0 and (tmp_path / "run.html").exists()
    assert main([str(tmp_path / "none")]) == 1
    assert "recording: cannot use" in capsys.readouterr().err
    assert main([str(run), "-o", str(tmp_path / "no" / "page.html")]) == 1
    assert "output: cannot use" in capsys.readouterr().err


def test_route_asks_for_the_key_and_reads_a_growing_file(tmp_path: Path) -> None:
    app, path = FastAPI(), tmp_path / "run"
    path.write_bytes(b"")
    add_viewer_route(app, path, Access({"": "secret"}))

    async def ask() -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            key = {"authorization": "Bearer secret"}
            assert (await client.get("/viewer", headers=key)).status_code == 503
            record(path, 3, 5)
            path.write_bytes(path.read_bytes()[:-7])  # the last line is half written
            found = await client.get("/viewer", headers=key)
            assert found.status_code == 200 and "A run, step by step" in found.text
            assert (await client.get("/viewer")).status_code != 200

    asyncio.run(ask())


@pytest.mark.parametrize("keys", [{}, {"": "secret", "ann": "hers"}, {"ann": "hers"}])
def test_the_page_is_for_the_operator_alone(tmp_path: Path, keys: dict[str, str]) -> None:
    """It shows what other clients got; without a key, this machine is the operator's."""
    app = FastAPI()
    app.add_exception_handler(ApiError, lambda _, error: Response(status_code=error.status_code))  # type: ignore[attr-defined]
    add_viewer_route(app, record(tmp_path / "run", 3, 5), Access(keys))

    async def ask(key: str, address: str, **more: str) -> int:
        transport = httpx.ASGITransport(app=app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return (await client.get("/viewer", headers={**headers, **more})).status_code

    for name in ("via", "forwarded", "x-forwarded-for"):  # a proxy on this machine
        passed_on = asyncio.run(ask("secret", "127.0.0.1", **{name: "8.8.8.8"}))
        assert passed_on == (200 if "" in keys else 401 if keys else 403)
    for site in ("cross-site", "same-site", "same-origin", "none"):  # as a browser here says
        shown = asyncio.run(ask("secret", "127.0.0.1", **{"sec-fetch-site": site}))
        strange = site == "cross-site"
        assert shown == (200 if "" in keys else 401 if keys else 403 if strange else 200)

    for key, name in (("", None), ("secret", ""), ("hers", "ann")):
        for address in ("127.0.0.1", "10.0.0.7"):
            status = asyncio.run(ask(key, address))
            if keys and name not in keys:
                assert status == 401
            elif keys:
                assert status == (403 if name else 200)
            else:
                assert status == (200 if address == "127.0.0.1" else 403)


def test_many_requests_for_the_live_page_make_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that asks all the time must not keep the threads of the server busy."""
    clock, made = [100.0], list[Path]()

    def make(path: Path) -> bytes:
        made.append(path)
        clock[0] += 2.0  # seconds
        return f"page {len(made)}".encode()

    monkeypatch.setattr(viewer, "page_in_process", make)
    monkeypatch.setattr(viewer, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def ask() -> None:
        live = LivePage(tmp_path / "run")
        assert await asyncio.gather(*(live.read() for _ in range(60))) == [b"page 1"] * 60
        clock[0] += 19.9
        assert await live.read() == b"page 1"
        clock[0] += 0.2
        assert await live.read() == b"page 2" and len(made) == 2

    asyncio.run(ask())


def test_the_page_of_a_server_is_made_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long recording would hold the interpreter lock for seconds, and leave its memory."""
    path = record(tmp_path / "-run.jsonl", 3, 5)
    want = page_of(path).encode()
    monkeypatch.setattr("minisgl.viewer.page.read_recording", None)
    monkeypatch.chdir(tmp_path)
    live = LivePage(Path("-run.jsonl"))
    assert asyncio.run(live.read()) == want
    path.write_text("no recording\n")
    with pytest.raises(ValueError, match=r"run\.jsonl"):
        page_in_process(path)


# ----------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("viewer") / "run.jsonl", 40, 200)


class Page:
    """A page of a recording in a browser; errors and requests are collected."""

    def __init__(self, browser: Any, recording: Path, **context: Any) -> None:
        file = recording.with_suffix(".html")
        file.write_text(page_of(recording), encoding="utf-8")
        context.setdefault("viewport", {"width": 1300, "height": 900})
        self.page = browser.new_page(**context)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"file://{file}")
        self.page.wait_for_selector("body.ready", timeout=120_000)

    def __call__(self, script: str) -> Any:
        return self.page.evaluate(script)

    def close(self) -> None:
        self.page.close()
        assert self.errors == []
        assert [url for url in self.asked if not url.startswith(("file:", "data:"))] == []


@pytest.fixture
def page(browser: Any, recording: Path) -> Iterator[Page]:
    opened = Page(browser, recording)
    yield opened
    opened.close()


STATE = """(() => ({
  free: [...state.owner.keys()].filter((page) => state.owner[page] === FREE),
  nodes: [...state.nodes.values()].map((n) => [n.page, n.pages, n.parent, n.locks]),
  order: state.evictionOrder().map((node) => node.page),
  requests: [...state.requests.values()].map((r) => [r.uid, r.state, r.row, r.pages, r.shared,
    run.answers.get(r.uid).slice(0, r.tokens).map(({ token }) => token)]),
}))()"""


def test_page_replays_to_the_same_end(page: Page, recording: Path) -> None:
    """And to the same state in the middle, wherever it jumps from."""
    whole = read_recording(recording)
    frames = page("run.frames.map((frame) => frame.end)")
    for frame in (len(frames) - 1, 3, len(frames) // 2, 31, 32, 33, 0):
        page(f"seek({frame})")
        end = replay(type(whole)(whole.about, whole.lines[: frames[frame]]))
        found = page(STATE)
        assert found["free"] == sorted(end.free)
        nodes = [[name, n.pages, n.parent, n.locks] for name, n in end.nodes.items()]
        assert sorted(found["nodes"]) == sorted(nodes)
        assert found["order"] == list(end.lru)
        requests = [
            [r.uid, r.state, r.row, r.pages, r.shared, r.answer] for r in end.requests.values()
        ]
        assert found["requests"] == requests


def test_play_and_scrub(page: Page) -> None:
    page.page.select_option("#speed", "60")
    page.page.click("#play")
    page.page.wait_for_function("now.frame >= 3")
    page.page.click("#play")
    at = page("now.frame")
    page.page.wait_for_timeout(100)
    assert page("now.frame") == at and page("now.playing") is None
    box = page.page.locator("#overview").bounding_box()
    page.page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 20)
    page.page.mouse.down()
    quarter = page("now.frame")
    page.page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 20)
    page.page.mouse.up()
    count = page("run.frames.length")
    assert abs(quarter - count / 4) <= 2 and abs(page("now.frame") - 3 * count / 4) <= 2
    page("document.getElementById('step').value = 7")
    page.page.dispatch_event("#step", "input")
    assert page("now.frame") == 7 and "step 7" in page.page.inner_text("#where")


def test_keyboard(page: Page) -> None:
    press = page.page.keyboard.press
    for key, frame in (("ArrowRight", 1), ("Shift+ArrowRight", 11), ("ArrowLeft", 10), ("Home", 0)):
        press(key)
        assert page("now.frame") == frame
    press("End")
    assert page("now.frame") == page("run.frames.length") - 1
    press("Home")
    press("Shift+ArrowRight")
    press("]")
    assert page("now.selected.kind") == "request"
    assert "request" in page.page.inner_text("#say")
    press("Escape")
    assert page("now.selected") is None
    press(" ")
    page.page.wait_for_function("now.frame > 10")
    press(" ")
    assert page("now.playing") is None
    page.page.focus("#pages")
    press("ArrowRight")
    press("Enter")
    assert page("now.selected") == {"kind": "page", "id": 1}
    assert "page 1" in page.page.inner_text("#say")
    page.page.focus("#tree [data-node]")
    press("Enter")
    assert page("now.selected.kind") == "node"


def test_one_click_lights_up_every_panel(page: Page) -> None:
    page("seek(60)")
    uid = page("[...state.requests.values()].find((r) => r.row >= 0 && r.shared > 0).uid")
    page.page.click(f"#running [data-uid='{uid}']")
    lit = page(
        "(() => { const lit = highlighted(); return [...lit.pages].sort((a, b) => a - b); })()"
    )
    assert lit == sorted(page(f"state.requests.get({uid}).pages"))
    assert page.page.get_attribute(f"[data-uid='{uid}']", "aria-pressed") == "true"
    assert page("document.querySelectorAll('#tree .lit').length") > 0
    assert f"request {uid}" in page.page.inner_text("#text")
    page.page.click(f"[data-uid='{uid}']")  # once more: off
    assert page("now.selected") is None
    node = page("[...state.nodes.keys()][0]")
    page.page.click(f"#tree [data-node='{node}']")
    assert page("now.selected") == {"kind": "node", "id": node}
    assert node in page("[...highlighted().pages]")
    page.page.click("#pages", position={"x": 5, "y": 5})
    assert page("now.selected") == {"kind": "page", "id": 0}
    page.page.click("#table", position={"x": 20, "y": 8})
    assert page("now.selected.kind") == "request"
    page.page.click("#selection")
    assert page("now.selected") is None


def test_events_name_their_functions_and_chapters(page: Page) -> None:
    page("seek(40)")
    text = page.page.inner_text("#events")
    assert "Scheduler.launch" in text and "step 40 is launched" in text
    assert page.page.inner_text("#events-count") != "0"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1300])
def test_fits_small_screens_and_both_themes(
    browser: Any, recording: Path, scheme: str, width: int
) -> None:
    page = Page(
        browser, recording, color_scheme=scheme, viewport={"width": width, "height": 800}
    )  # fmt: skip
    page("seek(50)")
    assert page("document.documentElement.scrollWidth") <= width
    shade = "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)"
    assert (sum(page(shade)) < 3 * 128) == (scheme == "dark")
    page.page.click("#theme")
    assert (sum(page(shade)) < 3 * 128) == (scheme == "light")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("simulated", [False, True])
def test_axe_finds_no_fault(browser: Any, recording: Path, scheme: str, simulated: bool) -> None:
    page = Page(browser, recording, color_scheme=scheme, viewport={"width": 1300, "height": 3000})
    if simulated:
        open_what_if(page)
    page("seek(60); nextRequest(1)")
    assert faults(page.page) == []
    page.close()


def test_everything_has_a_name(page: Page) -> None:
    """Buttons, canvases and sliders have text or a label; those of lists too."""
    page("seek(50)")
    nameless = page("""[...document.querySelectorAll('button, canvas, input, select, [tabindex]')]
      .filter((e) => !e.getAttribute('aria-label') && !e.innerText?.trim() && !e.labels?.length)
      .map((e) => e.outerHTML.slice(0, 80))""")
    assert nameless == []
    assert page("document.documentElement.lang") == "en"


def test_prompts_that_were_not_recorded_are_not_shown(browser: Any, tmp_path: Path) -> None:
    with LLM(device="cpu", num_pages=64, page_size=4, record=tmp_path / "run") as llm:
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=4, ignore_eos=True))
    page = Page(browser, tmp_path / "run")
    page("seek(2)")
    assert "not recorded" in page.page.inner_text("#text")
    assert "Once" not in page.page.inner_text("#text")
    page.close()


SCRUB = """(frames) => new Promise((resolve) => {
  const gaps = [];
  let last = null;
  const tick = (time) => {
    if (last !== null) gaps.push(time - last);
    last = time;
    if (gaps.length === frames) return resolve(gaps.sort((a, b) => a - b));
    seek((gaps.length * 7919) % run.frames.length);
    requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
})"""


def test_long_runs_are_scrubbed_quickly(browser: Any, tmp_path: Path) -> None:
    """5,000 steps and 500 requests: 60 ms a frame, in CPU time from the script to the pixels.

    On a machine with nothing else to do a frame takes less: the threads share the work.
    """
    sizes = {"num_pages": 1000, "max_running_req": 32, "budget": 256}
    page = Page(browser, record(tmp_path / "run", 500, 5000, **sizes))
    frames, requests = page("run.frames.length"), page("run.answers.size")
    assert frames >= 5000 and requests >= 500
    main_ms, cpu_ms = cpu_clock(page.page), whole_cpu_clock(browser)
    page.page.evaluate(SCRUB, 20)
    main, cpu = main_ms(), cpu_ms()
    gaps = page.page.evaluate(SCRUB, 120)
    main, cpu = (main_ms() - main) / len(gaps), (cpu_ms() - cpu) / len(gaps)
    print(f"{frames} frames, {requests} requests: {cpu:.1f} ms of CPU a frame, {main:.1f} of them "
          f"of the main thread; on the clock median {gaps[60]:.0f} ms, 95 % {gaps[-7]:.0f} ms, "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
    assert cpu < 60
    page.close()


def test_a_frame_is_drawn_once_and_again_only_for_another_width(page: Page) -> None:
    """A step with other lists changes the height of the page, which resizes no panel."""
    page("(() => { const once = draw; window.drawn = 0; draw = () => { drawn += 1; once(); }; })()")
    page.page.evaluate(SCRUB, 30)
    assert page("drawn") == 30
    page.page.set_viewport_size({"width": 700, "height": 900})
    page.page.wait_for_function("drawn > 30")
    assert page("widths.overview < 700 && $('overview').width === widths.overview")


def open_what_if(page: Page) -> None:
    page.page.click("#what-if summary")
    page.page.wait_for_function("whatIf.now !== null")


def test_what_if_simulates_another_run_and_returns_to_the_recording(
    browser: Any, recording: Path
) -> None:
    page = Page(browser, recording, viewport={"width": 420, "height": 800})
    recorded = page("run.events.length")
    open_what_if(page)
    assert page("run.about.device") == "simulated" and page("run.answers.size") == 40
    assert page("run === whatIf.recorded") is False
    page.page.focus("#what-if-pages")
    before = page("whatIf.now[0][1]")
    for _ in range(20):
        page.page.keyboard.press("ArrowLeft")  # moves the slider, not the clock
    assert page("run.about.num_pages") == 40 and page("now.frame") == 0
    assert page("whatIf.now[0][1]") != before
    assert "time for all requests" in page.page.inner_text("#say")
    page.page.select_option("#what-if-source", "random")
    page.page.select_option("#what-if-policy", "fair")
    page.page.select_option("#what-if-cache", "none")
    assert page("whatIf.now.find(([name]) => name.includes('cache'))[1]") == "0 %"
    assert page("run.answers.size") == 24 and page.page.is_enabled("#what-if-seed")
    assert page("document.documentElement.scrollWidth") <= 420
    page("seek(9)")
    assert "step 9" in page.page.inner_text("#where")
    page.page.click("#what-if summary")
    page.page.wait_for_function("run === whatIf.recorded")
    assert page("run.events.length") == recorded
    page.close()


def test_what_if_compares_a_drag_with_where_it_began(page: Page) -> None:
    open_what_if(page)
    first = page("whatIf.now")
    drag = "(e => { e.value = %d; e.dispatchEvent(new Event('%s')); })(field('pages'))"
    for pages in (50, 40, 30):
        page(drag % (pages, "input"))
        assert page("whatIf.before") == first
    page(drag % (30, "change"))
    dragged = page("whatIf.now")
    page(drag % (20, "input"))
    assert page("whatIf.before") == dragged


def test_what_if_without_recorded_prompts_makes_up_requests(browser: Any, tmp_path: Path) -> None:
    with LLM(device="cpu", num_pages=64, page_size=4, record=tmp_path / "run") as llm:
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=4, ignore_eos=True))
    page = Page(browser, tmp_path / "run")
    open_what_if(page)
    assert page("[...field('source').options].map((each) => each.value)") == ["random"]
    assert page("run.answers.size") == 24
    page.close()


def test_page_works_in_a_frame(browser: Any, recording: Path, tmp_path: Path) -> None:
    """As in a notebook: inside `srcdoc`, and with the theme of the page around it."""
    (tmp_path / "outer.html").write_text(
        f"<!doctype html><html data-theme='dark'><body>{Viewer(recording)._repr_html_()}"
    )
    outer = browser.new_page(color_scheme="light")
    outer.goto(f"file://{tmp_path / 'outer.html'}")
    frame = outer.frame_locator("iframe")
    frame.locator("body.ready").wait_for(timeout=120_000)
    frame.locator("#next").click()
    assert "step" in frame.locator("#where").inner_text()
    outer.close()


def test_two_runs_have_one_clock_and_one_selection(browser: Any, tmp_path: Path) -> None:
    """Whichever of them is moved; the shorter one stays at its end."""
    runs = {"long": record(tmp_path / "long", 20, 60), "short": record(tmp_path / "short", 9, 20)}
    (tmp_path / "pair.html").write_text(pair_of(runs), encoding="utf-8")
    outer = browser.new_page(viewport={"width": 1300, "height": 900})
    errors: list[str] = []
    outer.on("pageerror", lambda error: errors.append(str(error)))
    outer.goto(f"file://{tmp_path / 'pair.html'}")
    for index in range(2):
        outer.frame_locator("iframe").nth(index).locator("body.ready").wait_for(timeout=120_000)
    left, right = outer.frames[1:]
    for mover, other, frame in ((left, right, 7), (right, left, 3)):
        mover.evaluate(f"seek({frame})")
        other.wait_for_function(f"now.frame === {frame}")
        mover.evaluate("select('page', 5)")
        other.wait_for_function("now.selected?.id === 5")
        mover.evaluate("select(null)")
        other.wait_for_function("now.selected === null")
    left.evaluate("seek(run.frames.length - 1)")
    right.wait_for_function("now.frame === run.frames.length - 1")
    assert left.evaluate("now.frame") > right.evaluate("now.frame")
    left.evaluate("window.parent.postMessage(1, '*'); window.postMessage({frame: 'x'}, '*')")
    assert errors == []
    outer.close()


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_a_page_plays_by_itself_where_motion_is_welcome(
    browser: Any, recording: Path, motion: str
) -> None:
    file = recording.with_suffix(".html")
    file.write_text(page_of(recording), encoding="utf-8")
    page = browser.new_page(reduced_motion=motion)
    page.goto(f"file://{file}#loop")
    page.wait_for_selector("body.ready", timeout=120_000)
    assert (page.evaluate("now.playing") is None) == (motion == "reduce")
    if motion != "reduce":
        page.evaluate("seek(run.frames.length - 1)")
        page.wait_for_function("now.frame < run.frames.length - 1")  # and begins again
    page.close()


def test_kinds_of_events_are_all_described(page: Page) -> None:
    """No event shows its bare name."""
    kinds = {kind.__name__ for kind in events.Event.__subclasses__()}
    texts = page("run.events.map(([, event]) => [event[0], describe(event)[0]])")
    assert {kind for kind, _ in texts} <= kinds
    assert [text for kind, text in texts if text == kind] == []
