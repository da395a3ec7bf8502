"""The report page's style sheet and its only script."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d9dde2; --card: #ffffff; --back: #f6f7f9;
  --accent: #b34e00; --tint: #faf3ec; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #9aa4af; --line: #363c44; --card: #1a1d21;
  --back: #121417; --accent: #f0924a; --tint: #262019; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 72px; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; letter-spacing: -0.005em; margin: 44px 0 12px; }
p { margin: 0 0 12px; max-width: 76ch; overflow-wrap: anywhere; }
.lead { font-size: 1.05rem; }
.note { max-width: 104ch; margin: 10px 0 0; }
.note, figcaption, .hint { color: var(--soft); font-size: 0.88rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px; }
.card.scroll { overflow-x: auto; padding: 4px 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 9px 8px; text-align: right; border-bottom: 1px solid var(--line); vertical-align: baseline; }
th:first-child, td:first-child { text-align: left; padding-left: 16px; font-weight: 600; }
th:last-child, td:last-child { padding-right: 16px; }
td { white-space: nowrap; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 11em; }
td i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
thead th { color: var(--soft); font-weight: 600; font-size: 0.78rem; line-height: 1.3; vertical-align: bottom; }
tbody tr:last-child > * { border-bottom: 0; }
tbody tr:hover { background: var(--tint); }
th button { all: unset; cursor: pointer; }
th button:hover, th button:focus-visible { color: var(--accent); text-decoration: underline; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif
  !important; }
figcaption { margin-top: 10px; max-width: 90ch; }
dl { margin: 0; }
dt { font-weight: 600; margin-top: 14px; overflow-wrap: anywhere; }
dt:first-child { margin-top: 0; }
dd { margin: 2px 0 0; max-width: 84ch; overflow-wrap: anywhere; }
dl.arms { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; font-size: 0.93rem; margin: 4px 0 0; }
dl.arms dt, dl.arms dd { margin: 0; }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--soft); font-size: 0.92rem; }
details table { width: auto; margin: 8px 0; }
details td { text-align: left; padding-top: 4px; padding-bottom: 4px; white-space: normal; overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; overflow-x: auto;
  font: 0.86rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; margin: 0; }
@media (max-width: 640px) { main { padding: 28px 14px 48px; } .card { padding: 14px; }
  dl.arms { grid-template-columns: 1fr; gap: 0; } dl.arms dd { margin-bottom: 8px; } }
@media print { body { background: none; } .card { break-inside: avoid; } }
"""

# The page is whole without it: it only turns the headings of sortable tables into buttons.
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const ascending = heading.getAttribute("aria-sort") === "descending";
      headings.forEach(other => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const key = row => row.cells[column].dataset.value ?? "";
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const apart = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return ascending ? apart : -apart;
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    });
  });
}
"""
