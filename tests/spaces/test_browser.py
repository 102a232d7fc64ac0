"""The Space in a browser: headless Chromium, driven by Playwright."""

import re
import shutil
import time
from contextlib import contextmanager

import pytest
from hostile import HOSTILE
from huggingface_hub import constants


pytest.importorskip("gradio", reason='the page needs gradio: pip install "hf-dspark[space]"')
pytest.importorskip("playwright", reason="the browser tests need Playwright: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("the browser tests need a Chromium on the PATH: apt install chromium", allow_module_level=True)

import app  # noqa: E402
from pairs import Pairs  # noqa: E402
from playwright.sync_api import expect, sync_playwright  # noqa: E402
from replies import encode  # noqa: E402
from settings import Settings  # noqa: E402


pytestmark = pytest.mark.slow
PATIENCE = 120_000  # milliseconds: a busy machine is slow, and nothing here is timed
OWN_CACHE = constants.HF_HUB_CACHE
LONG = 6000  # tokens: far more than a test waits for
expect.set_options(timeout=PATIENCE)


@contextmanager
def served(settings, pairs):
    """The page on a port of its own, in this process."""
    blocks = app.build(settings, pairs)
    url = app.launch(blocks, prevent_thread_lock=True, quiet=True)
    try:
        yield url
    finally:
        blocks.close(verbose=False)


@pytest.fixture(scope="module")
def pairs(tiny_pair, tiny_hub):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DSPARK_EMBEDDED_TARGET", str(tiny_pair[0]))
        patch.setenv("HF_DSPARK_EMBEDDED_DRAFTER", str(tiny_pair[1]))
        patch.setattr(constants, "HF_HUB_CACHE", str(tiny_hub))
        yield Pairs(Settings())


@pytest.fixture(scope="module")
def url(pairs):
    with served(Settings(max_new_tokens=LONG, max_prompt_tokens=8000, time_limit=600), pairs) as address:
        yield address


@pytest.fixture(scope="module")
def narrow_url(pairs):
    """A Space that writes one reply at a time and lets one visitor wait."""
    with served(Settings(max_new_tokens=LONG, concurrency=1, queue_size=1, time_limit=600), pairs) as address:
        yield address


@pytest.fixture(scope="module")
def real_pairs():
    with pytest.MonkeyPatch.context() as patch:  # the tiny pair may stand in for the embedded one
        patch.delenv("HF_DSPARK_EMBEDDED_TARGET", raising=False)
        patch.delenv("HF_DSPARK_EMBEDDED_DRAFTER", raising=False)
        patch.setattr(constants, "HF_HUB_CACHE", OWN_CACHE)
        pairs = Pairs(Settings())
    with served(Settings(time_limit=600), pairs) as address:
        yield pairs, address


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, url):
    """Opens the page as a new visitor; what its scripts complain about fails the test."""
    contexts, complaints = [], []

    def open_page(address=url, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.goto(address)
        expect(page.locator("#status")).to_have_text("Ready.")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def message_box(page):
    return page.get_by_role("textbox", name=re.compile("^Message"))


def set_number(page, label, value):
    field = page.get_by_label(f"number input for {label}")
    field.fill(str(value))
    field.press("Tab")


def ask(page, text, tokens=24):
    set_number(page, "Longest reply, in tokens", tokens)
    message_box(page).fill(text)
    message_box(page).press("Enter")


def replies(page):
    return page.locator("#conversation .message.assistant")


def finished(page, number=1):
    """Wait until that many replies have their note; return the text of the last."""
    expect(replies(page).locator(".note")).to_have_count(number)
    return replies(page).last.locator(".text").evaluate("element => element.textContent")


def written_plainly(pair, text, tokens):
    """What the target alone answers."""
    inputs, _ = encode(pair, [{"role": "user", "content": text}], 8000)
    ids = pair.target.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return pair.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def same_text(shown, written):
    """Browsers show no NUL, and one line break for the two signs of a carriage return."""
    plain = [re.sub(r"[\x00\ufffd]", "", text.replace("\r\n", "\n").replace("\r", "\n")) for text in (shown, written)]
    return plain[0] == plain[1]


# ---------------------------------------------------------------------- chat


def test_chat(visit, pairs):
    page = visit()
    ask(page, "hello")
    assert same_text(finished(page), written_plainly(pairs.own, "hello", 24))
    assert replies(page).last.locator(".token").count() > 0
    expect(replies(page).last.locator(".note")).to_contain_text("24 tokens in")
    expect(message_box(page)).to_have_value("")
    expect(message_box(page)).to_be_focused()
    status = page.locator("#status [role=status][aria-live=polite]")
    expect(status).to_contain_text("Finished. The model wrote:")
    expect(page.locator("#runs tbody tr")).to_have_count(1)
    expect(page.locator("#measures .figures dd").first).not_to_have_text("–")

    message_box(page).fill("and again")
    page.get_by_role("button", name="Send").click()
    finished(page, 2)
    expect(page.locator("#conversation .message.user")).to_have_count(2)
    expect(page.locator("#runs tbody tr")).to_have_count(2)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#conversation .message")).to_have_count(0)


def test_the_reply_streams(visit):
    page = visit()
    ask(page, "hello", LONG)
    text = replies(page).last.locator(".text")
    expect(text).not_to_be_empty()
    length = len(text.text_content())
    page.wait_for_function(f"document.querySelector('.message.assistant .text').textContent.length > {length}")
    expect(page.locator(".caret")).to_have_count(1)
    page.get_by_role("button", name="Stop").click()
    finished(page)


def test_stop_ends_the_decoding_itself(visit, pairs):
    page, forwards = visit(), []
    handle = pairs.own.target.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        ask(page, "hello", LONG)
        expect(replies(page).last.locator(".token").first).to_be_visible()
        page.get_by_role("button", name="Stop").click()
        finished(page)
        expect(replies(page).last.locator(".note")).to_contain_text("Stopped.")
        count = len(forwards)
        time.sleep(1)
        assert 0 < count == len(forwards) < LONG
        # The page is ready for more, and a second press has nothing to stop.
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#status")).to_contain_text("Nothing is being written.")
        ask(page, "more", 8)
        finished(page, 2)
    finally:
        handle.remove()


def test_a_closed_page_ends_the_decoding(visit, pairs):
    page, forwards = visit(), []
    handle = pairs.own.target.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        ask(page, "hello", LONG)
        expect(replies(page).last.locator(".token").first).to_be_visible()
        page.close()
        before = -1
        while before != len(forwards):
            before = len(forwards)
            time.sleep(2)
        assert len(forwards) < LONG / 2
    finally:
        handle.remove()


# ---------------------------------------------------------------------- race


def test_race(visit, pairs):
    page = visit()
    page.get_by_role("tab", name="Race").click()
    set_number(page, "Longest reply, in tokens", 24)
    page.get_by_role("textbox", name="Prompt").fill("hello")
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".verdict")).to_contain_text("Same text, all 24 tokens, in ")
    plain, drafted = (page.get_by_role("group", name=f"Text: {name}") for name in ("Plain", "With the drafter"))
    assert plain.text_content() == drafted.text_content()
    assert same_text(plain.text_content(), written_plainly(pairs.own, "hello", 24))
    figures = page.locator(".lane .figures dd").all_text_contents()
    assert figures[0] == figures[3] == "24"
    assert figures[1] == "1.00"
    expect(page.locator("#status")).to_contain_text("Same text")


def test_a_stopped_race_compares_what_there_is(visit):
    page = visit()
    page.get_by_role("tab", name="Race").click()
    set_number(page, "Longest reply, in tokens", LONG)
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".lane .token").first).to_be_visible()
    page.locator("#stop-race").click()
    expect(page.locator(".verdict")).to_contain_text("Stopped. As far as both got")


# ---------------------------------------------------------------------- controls


def test_controls_change_what_is_checked(visit):
    page = visit()
    threshold = page.get_by_label("number input for Least confidence")
    expect(threshold).to_be_disabled()
    checked = page.locator("#measures .figures dd").nth(2)
    ask(page, "hello")
    finished(page)
    every = float(checked.text_content())

    page.get_by_label("Check while confident").check()
    expect(threshold).to_be_enabled()
    set_number(page, "Least confidence", 1)
    ask(page, "hello")
    finished(page, 2)
    assert float(checked.text_content()) == 0
    assert every > 1

    page.get_by_label("Check every draft").check()
    expect(threshold).to_be_disabled()
    set_number(page, "Drafts a round", 2)
    ask(page, "hello")
    finished(page, 3)
    assert 1 < float(checked.text_content()) <= 2
    positions = page.locator("#measures .positions li .sr").all_text_contents()
    assert "checked in 0%" not in positions[1]
    assert all("checked in 0%" in text for text in positions[2:])
    first = page.locator("#runs tbody tr").first
    expect(first).to_contain_text("Check every draft2")


def test_sampling(visit):
    page = visit()
    set_number(page, "Temperature", 1)
    ask(page, "hello")
    finished(page)
    expect(page.locator("#runs tbody tr")).to_have_count(1)


# ---------------------------------------------------------------------- errors


def test_empty_and_long_messages(visit):
    page = visit()
    ask(page, "  ")
    expect(page.get_by_role("alert")).to_have_text("Write a message first.")
    expect(page.locator("#conversation .message")).to_have_count(0)
    long = "x" * 9000
    ask(page, long)
    expect(page.get_by_role("alert")).to_contain_text("tokens, and 8,000 is the most")
    expect(message_box(page)).to_have_value(long)
    expect(page.locator("#conversation .message")).to_have_count(0)
    ask(page, "short")
    finished(page)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_own_pair(visit):
    page = visit()
    page.get_by_role("tab", name="Your drafter").click()

    def load(target, drafter):
        page.locator("#target-id").locator("input, textarea").fill(target)
        page.locator("#drafter-id").locator("input, textarea").fill(drafter)
        page.get_by_role("button", name="Load").click()

    for drafter, words in (
        ("", "Name the drafter"),
        ("no such id", "is no Hub id"),
        ("nobody/nothing", "can't be had"),
        ("tiny/target", "can't be loaded"),
    ):
        load("tiny/target", drafter)
        expect(page.get_by_role("alert")).to_contain_text(words)
    load("tiny/target", "tiny/drafter")
    expect(page.locator("#pair-notice")).to_contain_text("Loaded.")
    expect(page.locator(".pair")).to_contain_text("tiny/drafter")
    page.get_by_role("tab", name="Chat").click()
    ask(page, "hello", 8)
    finished(page)
    page.get_by_role("tab", name="Your drafter").click()
    page.get_by_role("button", name="Back to this Space's pair").click()
    expect(page.locator(".pair")).not_to_contain_text("tiny/drafter")


# ---------------------------------------------------------------------- several visitors


def test_two_visitors_at_once(visit, pairs):
    one, two = visit(), visit()
    two.get_by_role("tab", name="Your drafter").click()
    two.locator("#target-id").locator("input, textarea").fill("tiny/target")
    two.locator("#drafter-id").locator("input, textarea").fill("tiny/drafter")
    two.get_by_role("button", name="Load").click()
    expect(two.locator(".pair")).to_contain_text("tiny/drafter")
    two.get_by_role("tab", name="Chat").click()
    for page, text in ((one, "first"), (two, "second")):
        ask(page, text, 300)
    texts = [finished(page) for page in (one, two)]
    for shown, text in zip(texts, ("first", "second")):
        assert same_text(shown, written_plainly(pairs.own, text, 300))
    expect(one.locator(".pair")).not_to_contain_text("tiny/drafter")
    # Stopping one leaves the other alone.
    for page in (one, two):
        ask(page, "more", LONG)
        expect(replies(page).last.locator(".token").first).to_be_visible()
    one.get_by_role("button", name="Stop").click()
    finished(one, 2)
    expect(two.locator(".caret")).to_have_count(1)
    two.get_by_role("button", name="Stop").click()
    finished(two, 2)


def test_one_piece_of_work_a_visitor(visit):
    page = visit()
    ask(page, "hello", LONG)
    expect(replies(page).last.locator(".token").first).to_be_visible()
    ask(page, "impatient")
    expect(page.get_by_role("alert")).to_contain_text("The last one is not over yet")
    expect(message_box(page)).to_have_value("impatient")
    page.get_by_role("button", name="Stop").click()
    finished(page)
    page.wait_for_timeout(1000)
    expect(page.locator("#conversation .message")).to_have_count(2)
    expect(page.locator("#runs tbody tr")).to_have_count(1)


def test_clear_forgets_what_is_being_written(visit):
    page = visit()
    ask(page, "hello", LONG)
    expect(replies(page).last.locator(".token").first).to_be_visible()
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#conversation .message")).to_have_count(0)
    page.wait_for_timeout(2000)
    expect(page.locator("#conversation .message")).to_have_count(0)
    ask(page, "more", 8)
    finished(page)
    expect(page.locator("#conversation .message")).to_have_count(2)


def test_a_full_queue_refuses_and_forgets(visit, narrow_url):
    writing, waiting, refused = (visit(narrow_url) for _ in range(3))
    ask(writing, "hello", LONG)
    expect(replies(writing).last.locator(".token").first).to_be_visible()
    ask(waiting, "hello", 8)
    expect(waiting.locator("#status")).to_contain_text("Waiting for the model.")
    waiting.wait_for_timeout(1000)
    ask(refused, "hello", 8)
    expect(refused.get_by_role("alert")).to_contain_text("Too many people are waiting.")
    expect(message_box(refused)).to_have_value("hello")
    expect(refused.locator("#conversation .message")).to_have_count(0)
    writing.get_by_role("button", name="Stop").click()
    finished(writing)
    finished(waiting)
    ask(refused, "again", 8)
    finished(refused)


# ---------------------------------------------------------------------- the simulator


def test_simulator(visit):
    page = visit()
    page.get_by_role("tab", name="Under load").click()
    scheduled = page.locator("#simulated .figures dd").first
    requests = page.locator("#simulated .requests li")
    expect(requests).to_have_count(16)
    first = scheduled.text_content()
    set_number(page, "Requests in the batch", 40)
    expect(requests).to_have_count(40)
    set_number(page, "Free tokens", 1)
    expect(scheduled).to_have_text("1.00×")
    expect(page.locator("#simulated")).to_contain_text("Drafting does not pay at this load")
    assert first != "1.00×"
    # What belongs to chat and race is not shown here, and comes back.
    expect(page.locator("#measures")).to_be_hidden()
    page.get_by_role("tab", name="Chat").click()
    expect(page.locator("#measures")).to_be_visible()


# ---------------------------------------------------------------------- hostile text, phones, screen readers


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:12]))
def test_hostile_text_does_no_harm(visit, text):
    page = visit(viewport={"width": 390, "height": 844})
    ask(page, text, 8)
    finished(page)
    shown = page.locator("#conversation .message.user .text").evaluate("element => element.textContent")
    assert same_text(shown, text)
    page.get_by_role("tab", name="Race").click()
    page.get_by_role("textbox", name="Prompt").fill(text)
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".verdict .notice.good")).to_be_visible()
    page.get_by_role("tab", name="Your drafter").click()
    for field in ("#drafter-id", "#target-id"):
        page.locator(field).locator("input, textarea").fill(text)
    page.get_by_role("button", name="Load").click()
    expect(page.get_by_role("alert")).to_contain_text("is no Hub id")
    assert page.evaluate("window.harmed") is None
    assert page.locator(".message script, .message img, .message a, .notice script, .notice img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_every_screen_and_names_every_control(visit, width, scheme):
    page = visit(viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
    ask(page, "hello", 8)
    finished(page)
    for tab in ("Chat", "Race", "Under load", "Your drafter"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, [role=tab]')].filter(element => {
            if (!element.checkVisibility()) return false;
            const labels = [...(element.labels || [])].map(label => label.innerText).join('');
            return !(element.innerText + labels + (element.getAttribute('aria-label') || '')).trim();
        }).map(element => element.outerHTML.slice(0, 200))"""
    )
    assert nameless == []


def test_the_keyboard_is_enough(visit):
    page = visit()
    message_box(page).focus()
    page.keyboard.type("hello")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    set_number(page, "Longest reply, in tokens", 8)
    page.get_by_role("button", name="Send").focus()
    page.keyboard.press("Enter")
    finished(page)
    page.get_by_role("tab", name="Race").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Start the race")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_for_an_accessibility_audit_to_find(visit, scheme):
    """axe's rules, contrast (WCAG AA) among them, on every part of the page with something in it."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    page = visit(color_scheme=scheme)
    found = []

    def audit(where):
        page.wait_for_timeout(500)  # colours fade in
        violations = axe.run(page).response["violations"]
        found.extend((where, rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in violations)

    ask(page, "hello")
    finished(page)
    audit("chat")
    page.get_by_role("tab", name="Race").click()
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".verdict .notice.good")).to_be_visible()
    audit("race")
    page.get_by_role("tab", name="Under load").click()
    expect(page.locator("#simulated .requests")).to_be_visible()
    audit("load")
    page.get_by_role("tab", name="Your drafter").click()
    page.get_by_role("button", name="Load").click()
    expect(page.get_by_role("alert")).to_be_visible()
    audit("pair")
    assert found == []


# ---------------------------------------------------------------------- the real pair


@pytest.mark.real
def test_the_real_pair(visit, real_pairs):
    """Accepted tokens show, corrections too, and the race ends with the same text."""
    pairs, address = real_pairs
    page = visit(address)
    question = "Solve 3x + 7 = 22 step by step."
    ask(page, question, 48)
    assert same_text(finished(page), written_plainly(pairs.own, question, 48))
    reply = replies(page).last
    assert reply.locator(".token.accepted").count() > 10
    assert reply.locator(".token.correction").count() > 5
    page.get_by_role("tab", name="Race").click()
    page.get_by_role("textbox", name="Prompt").fill(question)
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator(".verdict .notice.good")).to_contain_text("Same text, all 48 tokens")
    assert float(page.locator(".lane .figures dd").nth(4).text_content()) > 1.3
