"use strict";
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart);
  const cursor = svg.querySelector(".cursor");
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = chart.low + (x - chart.left) / (chart.right - chart.left) * (chart.high - chart.low);
    const nearest = (points) => points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
    const shown = chart.lines.map((line) => [line, nearest(line.points)]);
    const closest = nearest(shown.map(([, point]) => point));
    const at = chart.left + (closest[0] - chart.low) / (chart.high - chart.low) * (chart.right - chart.left);
    for (const [name, value] of [["x1", at], ["x2", at], ["y1", 10], ["y2", svg.viewBox.baseVal.height - 26]]) {
      cursor.setAttribute(name, value);
    }
    cursor.style.visibility = "visible";
    tip.replaceChildren();
    const head = document.createElement("div");
    head.textContent = `step ${closest[0]}`;
    tip.append(head);
    for (const [line, point] of shown) {
      const row = document.createElement("div");
      const key = document.createElement("span");
      key.className = `key c${line.color}${line.dashed ? " dashed" : ""}`;
      const elsewhere = point[0] === closest[0] ? "" : ` at step ${point[0]}`;
      row.append(key, `${line.name}: ${Number(point[1].toPrecision(5))}${elsewhere}`);
      tip.append(row);
    }
    tip.style.visibility = "visible";
    tip.style.left = `${Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  });
  svg.addEventListener("mouseleave", () => {
    cursor.style.visibility = tip.style.visibility = "hidden";
  });
}
