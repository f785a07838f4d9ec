// Sets the theme before the first paint, so that a chosen one does not flash the other.
// Not a module: modules run after the page is parsed.
(() => {
  const key = "ntp-sidecar-theme";
  const themes = ["auto", "light", "dark"];
  const root = document.documentElement;

  function stored() {
    try {
      return localStorage.getItem(key);
    } catch {
      return null; // storage may be blocked; the theme then lasts for this visit
    }
  }

  function apply(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    root.style.colorScheme = theme === "auto" ? "light dark" : theme;
  }

  let theme = themes.includes(stored()) ? stored() : "auto";
  apply(theme);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => { button.textContent = `Theme: ${theme}`; };
    label();
    button.addEventListener("click", () => {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      apply(theme);
      label();
      try {
        localStorage.setItem(key, theme);
      } catch {
        // as above
      }
    });
  });
})();
