// The page: a table of views, and its start.
//
// To add a view, write one module in views/ and one line in VIEWS. The module's default export is a Preact component:
//
//   import { html, useState } from "../dom.js";      templates and hooks
//   import { useGet, post } from "../api.js";        the REST: `useGet("/admin/…")` is {data, error, loading, reload}
//   import { useLive, rate } from "../live.js";      the live picture, while the component is shown
//   import { link, go } from "../router.js";         `href=${link("sessions", ["s-1"], {text: "true"})}`
//   import { Card, Table, Badge, … } from "../parts.js";   import { number, ago, … } from "../format.js";
//   import { ask, announce } from "../dialogs.js";   a question before an action, and a notice after it
//   import { useHeading } from "../shell.js";        another heading than the view's title: "Session s-1"
//
//   export default function Sessions({ route, me }) { return html`<${Card} title="…">…<//>`; }
//
//   route   {view, path, query}: `#/sessions/s-1?text=true` is {view: "sessions", path: ["s-1"], query: {text: "true"}}
//   me      {role: "admin" | "client", key, model}
//
// `knows`: the paths and the query that a view has (`stray` of router.js); the shell says what of an address it ignores.
//
// The shell shows the heading, moves the focus to it when view or path change, and catches what a component throws.
// A view has headings from <h2> on. `style`: the view's own style sheet, which lies beside it in views/.
import { html, render } from "./dom.js";
import { Shell } from "./shell.js";

const ANY = /^[^]*$/;
const NUMBER = /^-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const WHOLE = /^\d{1,15}$/;
const TOKEN_COLOURS = /^(logprob|version|mask|advantage|ratio|verdict)$/;
const SEARCH = { id: ANY, task_id: ANY, group_id: ANY, user: ANY, verdict: /^[a-z_]*$/, min_reward: NUMBER, max_reward: NUMBER, version: WHOLE, trained_version: WHOLE };
const SHOWN = { colour: TOKEN_COLOURS, start: WHOLE, turns: WHOLE, with: ANY, with_turn: ANY, with_start: WHOLE, view: /^tokens$/ };

export const VIEWS = [
  { id: "now", title: "Now", icon: "pulse", roles: ["admin"], style: "operators.css", knows: { path: 0 }, load: () => import("./views/now.js") },
  { id: "policies", title: "Policies", icon: "layers", roles: ["admin"], style: "operators.css", knows: { path: 0 }, load: () => import("./views/policies.js") },
  { id: "sessions", title: "Sessions", icon: "list", roles: ["admin", "client"], style: "data.css", knows: { path: 2, query: { ...SEARCH, ...SHOWN } }, load: () => import("./views/sessions.js") },
  { id: "lineage", title: "Lineage", icon: "branch", roles: ["admin"], style: "data.css", knows: { path: /^$|^\d+$|^groups\/[^]+$/ }, load: () => import("./views/lineage.js") },
  { id: "learning", title: "Learning", icon: "chart", roles: ["admin"], style: "data.css", knows: { path: 0, query: { m: ANY, from: WHOLE, to: WHOLE, smooth: /^0(\.9|\.98)?$/, runs: ANY } }, load: () => import("./views/learning.js") },
];

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${Shell} views=${VIEWS} />`, root);
