"""The page of examples/space in headless Chromium, as wide as a desktop and as a telephone, used by its buttons."""

import asyncio
import html
import shutil
import socket
import subprocess
import threading
import time

import gradio
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from test_space import TEXT, page  # noqa: F401 -- a fixture

# The page in a frame, in which this script types and clicks, and tells what it sees.
USER = """
<!doctype html>
<iframe src="/app/" style="width: {width}px; height: {height}px; border: 0"></iframe>
<script>
const frame = document.querySelector("iframe");
const all = (selector) => [...frame.contentDocument.querySelectorAll(selector)].filter((found) => found.offsetParent);
const named = (selector, name) => all(selector).find((found) => found.textContent.trim() === name);
async function until(what) {{
  for (;;) {{
    try {{
      const found = what();
      if (found) return found;
    }} catch {{ /* It is not there yet. */ }}
    await new Promise((resolve) => setTimeout(resolve, 100));
  }}
}}
async function use() {{
  const text = await until(() => all("textarea")[0]);
  await until(() => named("button", "Continue"));
  // Until it listens.
  const typing = setInterval(() => {{
    text.value = {text};
    text.dispatchEvent(new frame.contentWindow.InputEvent("input", {{ bubbles: true }}));
    // gradio takes keys for input.
    text.dispatchEvent(new frame.contentWindow.KeyboardEvent("keypress", {{ key: "a", bubbles: true }}));
  }}, 3000);
  const following = await until(() => all("textarea")[1].value.length >= 60 && all("textarea")[1].value);
  clearInterval(typing);
  (await until(() => named("[role=tab]", "Memory"))).click();
  (await until(() => named("button", "What is the memory worth?"))).click();
  const tokens = await until(() => all("span[title$=' bits']").length && all("span[title$=' bits']"));
  const wide = frame.contentDocument.documentElement.scrollWidth;
  const coloured = tokens.filter((token) => token.style.background).map((token) => token.textContent);
  (await until(() => named("[role=tab]", "Heads"))).click();
  (await until(() => named("button", "Where do its heads look?"))).click();
  const picture = await until(() => all("img").find((image) => image.naturalWidth && image.clientWidth > 200));
  const widest = Math.max(wide, frame.contentDocument.documentElement.scrollWidth);
  return {{ following, coloured, picture: picture.clientWidth, widest }};
}}
use().then((seen) => fetch("/seen", {{ method: "POST", body: JSON.stringify(seen) }}));
</script>
"""


@pytest.fixture(scope="module")
def served(page):  # noqa: F811
    """The page at /app/, a user of it at /user, and what this one sees."""
    module, shown = page
    app, seen = FastAPI(), []

    @app.get("/user", response_class=HTMLResponse)
    def user(width: int, height: int):
        return USER.format(width=width, height=height, text=repr(TEXT))

    @app.post("/seen")
    async def tell(request: Request):
        seen.append(await request.json())

    app = gradio.mount_gradio_app(app, module.build(shown), path="/app")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="localhost", port=port, log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    yield f"http://localhost:{port}", seen
    server.should_exit = server.force_exit = True
    thread.join(30)


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desktop", "telephone"])
def test_the_page_is_used_in_a_browser(page, served, tmp_path, width, height):  # noqa: F811
    _, shown = page
    address, seen = served
    seen.clear()
    # A window of Chromium's is 500 points wide at least; the frame in it is as wide as asked for.
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,1000",
        f"--user-data-dir={tmp_path}/p",
    ]
    command = ["chromium", *options, "--remote-debugging-port=0", f"{address}/user?width={width}&height={height}"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 180
        while not seen and time.monotonic() < end:
            assert browser.poll() is None
            time.sleep(0.2)
    finally:
        browser.terminate()
        browser.wait(30)
        shutil.rmtree(tmp_path / "p", ignore_errors=True)
    [found] = seen
    ids = shown.tokenizer(TEXT)["input_ids"]
    expected = [html.unescape(shown.tokenizer.decode([token])) for token in ids[1:]]
    assert found["coloured"] == 2 * expected, "with memory and without"
    assert len(found["following"]) >= 60 and found["picture"] > 200
    assert found["widest"] <= width, "nothing has to be moved sideways to be seen"
