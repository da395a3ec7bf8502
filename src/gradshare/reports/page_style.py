"""The report page's style sheet and its only script."""

_LIGHT = """--ink: #1b1f24; --soft: #59636e; --line: #d9dde2; --card: #ffffff; --back: #f6f7f9; --accent: #b34e00;
  --tint: #faf3ec; --bad: #b3261e; --shade: 0 6px 24px rgb(0 0 0 / 14%);"""

STYLE = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n"
    + """@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #9aa4af; --line: #363c44;
  --card: #1a1d21; --back: #121417; --accent: #f0924a; --tint: #262019; --bad: #ff8a80;
  --shade: 0 6px 24px rgb(0 0 0 / 60%); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 48px 24px 72px; }
h1 { font-size: 1.15rem; line-height: 1.3; color: var(--soft); font-weight: 600; margin: 0 0 10px;
  overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; letter-spacing: -0.01em; margin: 52px 0 14px; }
h3 { font-size: 1rem; margin: 26px 0 10px; overflow-wrap: anywhere; }
p { margin: 0 0 12px; max-width: 76ch; overflow-wrap: anywhere; }
.headline { font-size: 1.75rem; line-height: 1.28; letter-spacing: -0.015em; font-weight: 650; max-width: 40em;
  margin: 0 0 24px; text-wrap: pretty; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin: 0 0 26px; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px; }
.tiles dt { margin: 0; font-weight: 500; font-size: 0.86rem; color: var(--soft); }
.tiles dd { margin: 2px 0 0; }
.tiles b { display: block; font-size: 1.5rem; line-height: 1.25; letter-spacing: -0.01em; font-weight: 650; }
.note { max-width: 104ch; margin: 10px 0 0; }
.note, figcaption, small { color: var(--soft); font-size: 0.86rem; }
.state { color: var(--bad); font-weight: 500; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px; }
.card.scroll { overflow: auto; padding: 4px 0; max-height: 36rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 9px 9px; text-align: right; border-bottom: 1px solid var(--line); vertical-align: baseline; }
th:first-child, td:first-child { text-align: left; padding-left: 18px; font-weight: 600; }
th:last-child, td:last-child { padding-right: 18px; }
td { white-space: nowrap; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 15em; }
td:last-child { white-space: normal; }
td small { display: block; font-size: 0.76rem; }
i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
thead th { color: var(--soft); font-weight: 600; font-size: 0.78rem; line-height: 1.3; vertical-align: bottom;
  position: sticky; top: -4px; background: var(--card); box-shadow: inset 0 -1px var(--line); z-index: 1; }
tbody tr:last-child > * { border-bottom: 0; }
tbody tr:hover { background: var(--tint); }
th button { all: unset; cursor: pointer; }
th button:hover, th button:focus-visible { color: var(--accent); text-decoration: underline; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
figure { margin: 0; position: relative; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif
  !important; }
figcaption { margin-top: 10px; max-width: 96ch; }
.made { margin: 6px 0 0; max-width: none; }
.tip { position: absolute; pointer-events: none; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; box-shadow: var(--shade); padding: 8px 12px; font-size: 0.82rem; line-height: 1.5; z-index: 2;
  font-variant-numeric: tabular-nums; max-width: 26em; }
.tip b { display: block; }
.tip span { display: flex; align-items: baseline; gap: 0 14px; justify-content: space-between; }
.tip em { font-style: normal; overflow-wrap: anywhere; }
.tip strong { font-weight: 600; white-space: nowrap; }
dl { margin: 0; }
dt { font-weight: 600; margin-top: 14px; overflow-wrap: anywhere; }
dt:first-child { margin-top: 0; }
dd { margin: 2px 0 0; max-width: 90ch; overflow-wrap: anywhere; }
dl.arms { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; font-size: 0.93rem; margin: 4px 0 0; }
dl.arms dt, dl.arms dd { margin: 0; }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--soft); font-size: 0.92rem; }
.experiment { margin: 0; border-bottom: 1px solid var(--line); }
.experiment > summary span { float: right; font-weight: 500; color: var(--soft); }
.experiment > summary { color: var(--ink); font-weight: 600; font-size: 1rem; padding: 6px 0; overflow-wrap: anywhere; }
.experiment[open] { padding-bottom: 28px; }
section > details table { width: auto; margin: 8px 0; }
section > details > table td { text-align: left; padding-top: 4px; padding-bottom: 4px; white-space: normal;
  overflow-wrap: anywhere; }
pre, code { font: 0.84rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
code { overflow-wrap: anywhere; color: var(--ink); }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; overflow: auto;
  max-height: 24rem; margin: 0; color: var(--ink); }
details pre { margin-top: 8px; background: var(--back); }
@media (max-width: 640px) { main { padding: 28px 14px 48px; } .card { padding: 14px; } .headline { font-size: 1.35rem; }
  dl.arms { grid-template-columns: 1fr; gap: 0; } dl.arms dd { margin-bottom: 8px; } }
"""
    + f"@media print {{ :root {{ {_LIGHT} --back: #ffffff; }} main {{ padding: 0; max-width: none; }}\n"
    + """  .card { break-inside: avoid; } .card.scroll, pre { max-height: none; overflow: visible;
  white-space: pre-wrap; }
  .card.scroll { white-space: normal; break-inside: auto; } tr { break-inside: avoid; } table { font-size: 7.5pt; }
  thead th { position: static; } }
"""
)

# The page is whole without it: it turns the headings of tables into buttons that sort, shows the values of the curves
# under the pointer, and unfolds everything for print. Text from the runs is only ever set as text.
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

const make = (parent, tag, text) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
};

for (const figure of document.querySelectorAll("figure[data-panels]")) {
  const panels = JSON.parse(figure.dataset.panels);
  const svg = figure.querySelector("svg");
  const marks = svg.appendChild(document.createElementNS(svg.namespaceURI, "g"));
  const tip = make(figure, "div");
  tip.className = "tip";
  tip.hidden = true;
  const mark = (tag, values) => {
    const made = marks.appendChild(document.createElementNS(svg.namespaceURI, tag));
    for (const [name, value] of Object.entries(values)) made.setAttribute(name, value);
  };
  const color = curve => curve.color === "#1b1f24" ? "currentColor" : curve.color;
  const hide = () => { tip.hidden = true; marks.replaceChildren(); };
  const show = (panel, wanted, event) => {
    const epochs = panel.curves.flatMap(curve => curve.epochs.filter((_, at) => curve.values[at] !== null));
    if (!epochs.length) return hide();
    const epoch = epochs.reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
    const x = panel.x[0] * epoch + panel.x[1];
    const say = value => panel.digits === null ? String(value) : value.toFixed(panel.digits);
    tip.replaceChildren();
    marks.replaceChildren();
    mark("line", {x1: x, x2: x, y1: panel.box[1], y2: panel.box[3], stroke: "currentColor", "stroke-opacity": 0.35});
    make(tip, "b", `epoch ${epoch}`);
    for (const curve of panel.curves) {
      const at = curve.epochs.indexOf(epoch), value = at < 0 ? null : curve.values[at];
      if (value === null) continue;
      const interval = curve.intervals[at];
      mark("circle", {cx: x, cy: panel.y[0] * value + panel.y[1], r: 3, fill: color(curve)});
      const line = make(tip, "span"), name = make(line, "em");
      make(name, "i").style.background = color(curve);
      name.append(curve.label);
      const spread = interval === null ? "" : ` \\u00b1 ${say(interval)}`;
      make(line, "strong", `${say(value)}${spread}${panel.unit}`);
    }
    tip.hidden = false;
    const frame = figure.getBoundingClientRect(), left = event.clientX - frame.left;
    const place = left + 18 + tip.offsetWidth > frame.width ? left - 18 - tip.offsetWidth : left + 18;
    tip.style.left = `${Math.max(4, place)}px`;
    tip.style.top = `${event.clientY - frame.top + 14}px`;
  };
  svg.addEventListener("pointermove", event => {
    const {x, y} = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const panel = panels.find(({box}) => box[0] <= x && x <= box[2] && box[1] <= y && y <= box[3]);
    if (panel) show(panel, (x - panel.x[1]) / panel.x[0], event); else hide();
  });
  svg.addEventListener("pointerleave", hide);
}

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => part.open = true));
"""
