// Names, and places in the order of the keyboard, for what Material makes in the browser.
function tell() {
  document.querySelectorAll(".md-search[role=dialog]").forEach((one) => one.setAttribute("aria-label", "Search"));
  document.querySelectorAll(".md-code__nav").forEach((one, i) => one.setAttribute("aria-label", `Code ${i + 1}`));
  for (const one of document.querySelectorAll(".md-typeset__scrollwrap")) {
    one.tabIndex = 0;
    one.setAttribute("role", "group");
    one.setAttribute("aria-label", "Table");
  }
}

document$.subscribe(() => setTimeout(tell));
