// Applies the stored choice of a theme before the first paint. It is no module, because modules run later.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("weir-theme");
  } catch {
    // the browser stores nothing: the system's theme applies
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
