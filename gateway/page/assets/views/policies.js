// Policies: the life of each version, and what an operator can do about it.
import { html } from "../dom.js";
import { useGet } from "../api.js";
import { Loading } from "../parts.js";

export default function Policies() {
  const { data } = useGet("/admin/policies");
  return data ? html`<p>${data.data.length}</p>` : html`<${Loading} />`;
}
