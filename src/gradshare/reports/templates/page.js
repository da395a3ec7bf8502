// The page is whole without this script: it sorts tables by their headings, shows the values of the curves under the
// pointer, switches arms off and on, and unfolds everything for print. Text from the runs is only ever set as text.

document.documentElement.classList.add("script");

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
      const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const apart = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return ascending ? apart : -apart;
      };
      table.classList.add("sorted");  // every row now shows its experiment
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

const off = new Set();  // names of arms
for (const term of document.querySelectorAll("dl.arms dt")) {
  const button = document.createElement("button"), arm = term.dataset.arm;
  button.setAttribute("aria-pressed", "true");
  button.append(...term.childNodes);
  term.append(button);
  button.addEventListener("click", () => {
    off.delete(arm) || off.add(arm);
    button.setAttribute("aria-pressed", String(!off.has(arm)));
    for (const path of document.querySelectorAll("figure path[data-arm]"))
      if (path.dataset.arm === arm) path.classList.toggle("off", off.has(arm));
  });
}

for (const figure of document.querySelectorAll("figure[data-panel]")) {
  const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg");
  let data, marks, tip;
  const hide = () => { if (tip) { tip.hidden = true; marks.replaceChildren(); } };
  const mark = (kind, color, d) => {
    const path = marks.appendChild(document.createElementNS(svg.namespaceURI, "path"));
    path.setAttribute("class", kind);
    path.style.color = color;
    path.setAttribute("d", d);
  };
  const show = (wanted, event) => {
    const [left, right, low, high] = data.box;
    const lines = data.lines.filter(line => line[2] && !off.has(line[4]));
    const known = data.epochs.filter((_, at) => lines.some(line => line[2][at] !== null));
    if (!known.length) return hide();
    const epoch = known.reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
    const at = data.epochs.indexOf(epoch), x = 1000 * (epoch - left) / (right - left);
    const say = value => data.digits === null ? String(value) : value.toFixed(data.digits);
    tip.replaceChildren();
    marks.replaceChildren();
    mark("half", "inherit", `M${x} 0V1000`);
    make(tip, "b", data.names ? data.names[at] : `epoch ${epoch}`);
    for (const [name, color, values, intervals] of lines) {
      if (values[at] === null) continue;
      mark("dot", color, `M${x} ${1000 * (high - values[at]) / (high - low)}h0`);
      const line = make(tip, "span"), label = make(line, "em");
      make(label, "i").style.background = color;
      label.append(name);
      const spread = intervals && intervals[at] !== null ? ` \u00b1 ${say(intervals[at])}` : "";
      make(line, "strong", `${say(values[at])}${spread}${data.unit}`);
    }
    tip.hidden = false;
    const frame = figure.getBoundingClientRect(), place = event.clientX - frame.left;
    const beside = place + 18 + tip.offsetWidth > frame.width ? place - 18 - tip.offsetWidth : place + 18;
    tip.style.left = `${Math.max(4, beside)}px`;
    tip.style.top = `${event.clientY - frame.top + 14}px`;
  };
  plot.addEventListener("pointermove", event => {
    if (!data) {
      data = JSON.parse(figure.dataset.panel);
      marks = svg.appendChild(document.createElementNS(svg.namespaceURI, "g"));
      tip = make(figure, "div");
      tip.className = "tip";
    }
    const frame = svg.getBoundingClientRect(), [left, right] = data.box;
    show(left + (right - left) * (event.clientX - frame.left) / frame.width, event);
  });
  plot.addEventListener("pointerleave", hide);
}

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => part.open = true));
