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
// The shell shows the heading, moves the focus to it when view or path change, and catches what a component throws.
// A view has headings from <h2> on. `style`: the view's own style sheet, which lies beside it in views/.
import { html, render } from "./dom.js";
import { Shell } from "./shell.js";

export const VIEWS = [
  { id: "now", title: "Now", icon: "pulse", roles: ["admin"], style: "operators.css", load: () => import("./views/now.js") },
  { id: "policies", title: "Policies", icon: "layers", roles: ["admin"], style: "operators.css", load: () => import("./views/policies.js") },
  { id: "sessions", title: "Sessions", icon: "list", roles: ["admin", "client"], style: "data.css", load: () => import("./views/sessions.js") },
  { id: "lineage", title: "Lineage", icon: "branch", roles: ["admin"], style: "data.css", load: () => import("./views/lineage.js") },
  { id: "learning", title: "Learning", icon: "chart", roles: ["admin"], style: "data.css", load: () => import("./views/learning.js") },
];

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${Shell} views=${VIEWS} />`, root);
