// Runs before the page is drawn: the theme that was chosen last, and no token left in the address.
"use strict";
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("myelin-theme");
  } catch {
    // Storage may be forbidden; the system's own theme holds then.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname);
})();
