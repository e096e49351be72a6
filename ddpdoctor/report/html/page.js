"use strict";
// What every part of the page shares: what hovering says, arrow keys over cells, filters, and copying.
const page = (() => {
  const said = document.getElementById("said");
  const tip = document.createElement("div");
  tip.className = "tip-box";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);

  function make(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function makeSvg(name, attributes = {}, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  // A tip for the keyboard stays while its cell is scrolled into sight.
  let isPinned = false;

  function showTip(text, x, y, pinned = false) {
    isPinned = pinned;
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4));
    const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }

  function hideTip(force = false) {
    if (force || !isPinned) tip.hidden = true;
  }

  function say(text) {
    said.textContent = text;
  }

  // A title works without the script. With it, one box says it for the mouse and for the keyboard.
  function takeTitles() {
    for (const element of document.querySelectorAll("main [title]")) {
      element.dataset.say = element.title;
      element.removeAttribute("title");
    }
    for (const title of document.querySelectorAll("main svg title")) {
      title.parentNode.dataset.say = title.textContent;
      title.remove();
    }
    let pointer = "";
    document.addEventListener("pointermove", (event) => {
      // Scrolling sends the event without a move.
      const place = `${event.screenX} ${event.screenY}`;
      if (place === pointer) return;
      pointer = place;
      const element = event.target.closest?.("[data-say]");
      if (element) showTip(element.dataset.say, event.clientX, event.clientY);
      else if (!event.target.closest?.(".bars")) hideTip();
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(true); });
    document.addEventListener("scroll", () => hideTip(), { passive: true, capture: true });
  }

  // Cells of a grid are td in rows; points of a chart are circles in groups; parts of a bar are groups in an svg.
  function rowsOf(holder) {
    const rows = [...holder.querySelectorAll("tbody tr, [data-row]")];
    return rows.map((row) => [...row.querySelectorAll("td, circle, .cell")]).filter((row) => row.length);
  }

  function words(cell) {
    if (cell.tagName !== "TD") return cell.dataset.say;
    const row = cell.parentNode.querySelector("th");
    const head = cell.closest("table").tHead.rows[0].cells[cell.cellIndex];
    const parts = [row?.textContent, head?.textContent, cell.textContent, cell.dataset.say];
    return [...new Set(parts.filter(Boolean))].join(", ");
  }

  function walkCells(holder) {
    const rows = rowsOf(holder);
    let at = null;
    const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    holder.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      if (!step || !rows.length || event.target !== holder) return;
      event.preventDefault();
      if (at) rows[at[0]][at[1]].classList.remove("on");
      const row = at ? Math.min(Math.max(at[0] + step[0], 0), rows.length - 1) : 0;
      const column = at ? Math.min(Math.max(at[1] + step[1], 0), rows[row].length - 1) : 0;
      at = [row, column];
      const cell = rows[row][column];
      cell.classList.add("on");
      cell.scrollIntoView({ block: "nearest", inline: "nearest" });
      const box = cell.getBoundingClientRect();
      showTip(words(cell), box.left, box.bottom - 12, true);
      say(words(cell));
    });
    holder.addEventListener("blur", () => {
      if (at) rows[at[0]][at[1]].classList.remove("on");
      hideTip(true);
    });
  }

  function filter(input) {
    const name = input.dataset.filter;
    const rows = [...document.querySelectorAll(`#${name} > *, [data-rows="${name}"] > *`)];
    const folds = new Set(rows.map((row) => row.closest("details")).filter(Boolean));
    const count = document.querySelector(`[data-filtered="${input.dataset.filter}"]`);
    const texts = rows.map((row) => row.textContent.toLowerCase());
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, number) => {
        row.hidden = !words.every((word) => texts[number].includes(word));
        shown += row.hidden ? 0 : 1;
      });
      if (words.length) folds.forEach((fold) => { fold.open = rows.some((row) => !row.hidden && fold.contains(row)); });
      count.textContent = words.length ? `${shown} of ${rows.length}` : "";
      say(count.textContent);
    });
  }

  async function copy(button) {
    const source = button.parentNode.querySelector("[data-copied]");
    let done = true;
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      getSelection().selectAllChildren(source);
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    say(button.textContent);
    setTimeout(() => { button.textContent = "Copy"; }, 2500);
  }

  function start() {
    document.documentElement.classList.add("js");
    takeTitles();
    document.querySelectorAll("[data-cells]").forEach(walkCells);
    document.querySelectorAll("[data-filter]").forEach(filter);
    document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", () => copy(button)));
    // Who is waited for stands at the right, and must be in sight.
    document.querySelectorAll(".graph .scroll").forEach((one) => { one.scrollLeft = one.scrollWidth; });
    document.querySelectorAll(".as-table").forEach((table) => { table.open = false; });
  }

  start();
  return { make, makeSvg, showTip, hideTip, say };
})();
