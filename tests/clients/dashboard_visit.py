"""What a person does with the dashboard, in a browser; prints what was seen, as JSON.

Run by the clients' own Python: URL of the page, path of Chromium, id of the replica's process.
"""

import json
import os
import signal
import sys

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

PAGE, CHROMIUM, REPLICA = sys.argv[1], sys.argv[2], int(sys.argv[3])
WAIT_MS = 120_000.0
said = {"hosts": [], "complaints": []}

with sync_playwright() as started:
    browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_default_timeout(WAIT_MS)
    page.on("request", lambda request: said["hosts"].append(request.url.split("/")[2]))
    page.on("pageerror", lambda error: said["complaints"].append(str(error)))
    page.on("console", lambda line: said["complaints"].append(line.text))
    page.goto(PAGE)
    page.get_by_text("Ready, up for").wait_for()

    # By the keyboard alone.
    page.get_by_label("Your question").focus()
    page.keyboard.type("What does the for statement do?")
    page.keyboard.press("Enter")
    page.get_by_text("of them were drafted").wait_for()
    said["answer"] = page.locator("#answer").inner_text()
    said["tokens"] = {kind: page.locator(f"#answer .{kind}").count() for kind in ("own", "drafted")}
    said["figures"] = page.locator("#figures").inner_text()
    page.locator("#batches tr:nth-child(2) td:nth-child(5)").wait_for()
    said["batches"] = page.locator("#batches tr").count() - 1
    said["complaints_before"] = list(said["complaints"])

    os.kill(REPLICA, signal.SIGKILL)
    page.get_by_text("No replica is ready").wait_for()
    page.get_by_text("Ready, up for").wait_for()

    # The checker adds a script of its own, which the page forbids.
    for scheme in ("light", "dark"):
        context = browser.new_context(bypass_csp=True, color_scheme=scheme)
        open_to_all = context.new_page()
        open_to_all.goto(PAGE)
        open_to_all.get_by_text("Ready, up for").wait_for()
        found = Axe().run(open_to_all).response["violations"]
        said[scheme] = [f"{each['impact']}: {each['id']}" for each in found]
    browser.close()
print(json.dumps(said))
