// Says to screen readers what the theme leaves unsaid.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
document.querySelectorAll(".md-nav--secondary .md-nav").forEach((each) => {
  each.removeAttribute("aria-label");
  each.setAttribute("role", "none");
});
const named = () => {
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((each, number) => {
    each.setAttribute("aria-label", `Code block ${number + 1}`);
  });
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((each) => { each.tabIndex = 0; });
};
named();
new MutationObserver(named).observe(document.body, { childList: true, subtree: true });
document.querySelectorAll(".md-typeset th:empty").forEach((each) => each.replaceWith(document.createElement("td")));
