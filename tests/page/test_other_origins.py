"""What a page of another origin can do in the browser of a person who is signed in: nothing."""

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from tests.support.gateway.running import ADMIN_KEY, Backends
from tests.support.page.browser import Tab
from tests.support.serving import serving
from tests.support.waiting import wait_until

ATTACK = """<!doctype html><title>evil</title>
<form id="form" method="post" action="{url}/admin/policies/hold" target="frame" enctype="text/plain">
<input name='{{"reason": "' value='evil"}}'></form><iframe name="frame"></iframe>
<img src="{url}/admin/status">
<script>
const results = [];
const tries = [
  () => fetch("{url}/admin/policies/hold",
        {{method: "POST", mode: "no-cors", credentials: "include", body: "{{}}"}}),
  () => fetch("{url}/admin/policies/hold", {{method: "POST", credentials: "include",
        headers: {{"content-type": "application/json"}}, body: "{{}}"}}),
  () => fetch("{url}/admin/status", {{credentials: "include"}}).then((reply) => reply.json()),
  () => fetch("{url}/page/session", {{credentials: "include"}}).then((reply) => reply.json()),
  () => new Promise((resolve, reject) => {{
    const source = new EventSource("{url}/page/events", {{withCredentials: true}});
    source.addEventListener("picture", (event) => resolve(event.data));
    source.onerror = () => reject(new Error("no stream"));
  }}),
];
document.getElementById("form").submit();
Promise.allSettled(tries.map((each) => each())).then((all) => {{
  const opaque = (each) => (each.value?.type === "opaque" ? "(opaque)" : "");
  document.title = "done " + all.map((each) => each.status + opaque(each)).join(" ");
}});
</script>"""


@pytest.mark.parametrize("keys", ["a cookie", "no keys"])
def test_a_page_of_another_origin_changes_and_reads_nothing(backends: Backends, tab: Tab, keys: str) -> None:
    """The other origin is another port of the host: the browser calls it same-site, and sends cookies."""
    backends.clear(None)
    key = ADMIN_KEY if keys == "a cookie" else None
    with backends.gateway(**({} if key else {"client_keys": [], "admin_keys": []})) as gateway:

        async def attack(_: Request) -> HTMLResponse:
            return HTMLResponse(ATTACK.format(url=gateway.url))

        with serving(Starlette(routes=[Route("/", attack)])) as evil:
            watched = tab(gateway.url, key)
            watched.expected += ["CORS", "Failed to load resource", "blocked", "Refused", "frame"]
            if key is None:
                watched.tab.get_by_role("navigation").wait_for()
            watched.tab.goto(evil)
            wait_until(lambda: watched.tab.title().startswith("done"))
            assert watched.tab.title() == "done fulfilled(opaque) rejected rejected rejected rejected"
            watched.hosts.clear()
        serving_plan = gateway.get("/admin/policies/serving", key=key).json()
        assert serving_plan["hold"] is None
