"use strict";

// The timeline page: charts, legend, details and controls.

const ROW = 30, GAP = 5, HEAD = 34, AXIS = 34, LABELS = 52;
// Widths in pixels: of bars that are merged, of the blocks that result, and the least height of a part of a block.
const NARROW = 5, BLOCK = 64, BAND = 4;

function startPage(document, window) {
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const byId = (id) => document.getElementById(id);
  const state = { scheme: data.colour_by, highlight: null, selected: null, shared: data.share_scale };
  const element = (tag, text, attributes) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    return made;
  };

  const segmentSpans = data.charts.map((chart) => {
    const found = new Map();
    chart.spans.segment.forEach((segment, at) => { if (segment >= 0) found.set(segment, at); });
    return found;
  });
  const segmentOf = new Array(data.operators.name.length);
  data.segments.forEach((members, at) => members.forEach((i) => { segmentOf[i] = at; }));

  // -- Colours

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colourOf = (name) => window.getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  dark.addEventListener("change", () => {
    patterns.clear();
    showLegend();
    requestDraw();
  });

  // -- Marks

  function categoryOf(panel, bars, at) {
    const scheme = data.schemes[state.scheme], segment = panel.chart.spans.segment[bars.span[at]];
    if (segment < 0) return -1;
    return data.operators.predicted_ms ? scheme.of_operator[bars.operator[at]] : scheme.of_segment[segment];
  }
  /** Return the colour and the hatch of a category; null stands for several. */
  function markOf(category) {
    const mark = category === null ? data.several_mark : category < 0 ? data.copy_mark : data.schemes[state.scheme].marks[category];
    return [mark[dark.matches ? 1 : 0], mark[2]];
  }

  const patterns = new Map();
  function fillOf(context, category, ratio) {
    const [colour, hatch] = markOf(category), ink = colourOf("background");
    if (!hatch) return colour;
    const key = colour + hatch + ratio;
    if (!patterns.has(key)) {
      const tile = element("canvas"), size = Math.round(8 * ratio);
      tile.width = tile.height = size;
      const drawn = tile.getContext("2d");
      drawn.fillStyle = colour;
      drawn.fillRect(0, 0, size, size);
      drawn.fillStyle = drawn.strokeStyle = ink;
      drawn.lineWidth = 1.4 * ratio;
      if (hatch.startsWith("/")) {
        drawn.beginPath();
        for (const shift of [-size, 0, size]) { drawn.moveTo(shift - 2, size + 2); drawn.lineTo(shift + size + 2, -2); }
        drawn.stroke();
      } else {
        drawn.beginPath();
        drawn.arc(size / 2, size / 2, 1.3 * ratio, 0, 2 * Math.PI);
        drawn.fill();
      }
      const pattern = context.createPattern(tile, "repeat");
      pattern.setTransform(new window.DOMMatrix().scale(1 / ratio));
      patterns.set(key, pattern);
    }
    return patterns.get(key);
  }

  // -- Charts

  const panels = data.charts.map((chart, index) => {
    const heading = element("h2", chart.title + " ");
    const shown = formatMs(chart.latency_ms) + ", " + chart.overlap.toFixed(2) + " lanes busy on average";
    heading.append(element("small", shown));
    const canvas = element("canvas", undefined, {
      tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": chart.title + " timeline of " + chart.lanes.length + " lanes, " + shown,
    });
    canvas.style.height = HEAD + chart.lanes.length * (ROW + GAP) + AXIS + "px";
    byId("charts").append(heading, canvas);
    return {
      chart, index, canvas, view: { start: 0, end: 1 }, ownTotal: chart.axis_end_ms, cursor: { lane: 0, bar: 0 },
      lanes: chart.lanes.map((_, lane) => laneBars(data, chart, lane)), merged: { scale: 0, lanes: [] },
    };
  });
  const totalOf = (panel) => (state.shared ? Math.max(...panels.map((p) => p.ownTotal)) : panel.ownTotal);

  function setView(panel, view) {
    for (const other of state.shared ? panels : [panel]) other.view = { ...view };
    requestDraw();
  }
  function resetViews() {
    for (const panel of panels) panel.view = { start: 0, end: totalOf(panel) };
    requestDraw();
  }

  let pending = false;
  function requestDraw() {
    if (pending) return;
    pending = true;
    window.requestAnimationFrame(() => { pending = false; panels.forEach(draw); });
  }

  function draw(panel) {
    const { canvas, view, chart } = panel;
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    const plot = { left: LABELS, right: width - 10, top: HEAD, bottom: HEAD + chart.lanes.length * (ROW + GAP) };
    const x = (ms) => plot.left + ((ms - view.start) / (view.end - view.start)) * (plot.right - plot.left);
    drawAxis(context, plot, view, x);
    panel.plot = plot;
    chart.lanes.forEach((lane, row) => {
      const y = plot.top + row * (ROW + GAP);
      context.fillStyle = colourOf("text");
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(lane.name, plot.left - 8, y + ROW / 2);
      context.save();
      context.beginPath();
      context.rect(plot.left, y, plot.right - plot.left, ROW);
      context.clip();
      drawBars(context, panel, row, y, x, ratio);
      context.restore();
    });
    drawLine(context, plot, x, chart.latency_ms, "end " + formatMs(chart.latency_ms), colourOf("text"), [], 14);
    if (data.slo_ms !== null) drawLine(context, plot, x, data.slo_ms, "SLO " + formatMs(data.slo_ms), colourOf("limit"), [6, 4], 28);
  }

  function drawAxis(context, plot, view, x) {
    const width = plot.right - plot.left;
    let count = Math.max(2, Math.floor(width / 60)), axis = makeTicks(view.start, view.end, count);
    const crowded = () => axis.ticks.length > 1 &&
      Math.max(...axis.ticks.map((tick) => context.measureText(tick.label).width)) + 14 > x(axis.ticks[1].ms) - x(axis.ticks[0].ms);
    while (count > 1 && crowded()) { count -= 1; axis = makeTicks(view.start, view.end, count); }
    const { unit, ticks } = axis;
    context.strokeStyle = colourOf("line");
    context.lineWidth = 1;
    context.fillStyle = colourOf("dim");
    context.textBaseline = "top";
    for (const tick of ticks) {
      const at = Math.round(x(tick.ms)) + 0.5;
      context.beginPath();
      context.moveTo(at, plot.top - 4);
      context.lineTo(at, plot.bottom + 3);
      context.stroke();
      const half = context.measureText(tick.label).width / 2;
      context.textAlign = "center";
      context.fillText(tick.label, Math.min(plot.right - half, Math.max(plot.left + half - 6, at)), plot.bottom + 5);
    }
    context.textAlign = "right";
    context.fillText("time in " + unit, plot.right, plot.bottom + 20);
  }

  /** Return the groups in which the bars of a lane are drawn at the present scale. */
  function groupsOf(panel, row) {
    const { plot, view, merged } = panel, scale = (view.end - view.start) / (plot.right - plot.left);
    if (merged.scale !== scale) panel.merged = { scale, lanes: panel.lanes.map((bars) => mergeBars(bars, NARROW * scale, BLOCK * scale)) };
    return panel.merged.lanes[row];
  }

  /** Draw the visible bars of a lane, and adjacent ones that are too narrow as blocks that show their categories. */
  function drawBars(context, panel, row, y, x, ratio) {
    const { plot, view } = panel, bars = panel.lanes[row], outlined = [];
    for (const group of groupsOf(panel, row)) {
      if (group.end < view.start || group.start > view.end) continue;
      const from = Math.max(plot.left, x(group.start)), to = Math.max(from + 1.5, Math.min(plot.right, x(group.end)));
      const wide = to - from < 3 ? to - from : to - from - 1;
      const { parts } = sharesOf(bars, group, (at) => categoryOf(panel, bars, at), state.highlight === null ? BAND / ROW : 0);
      drawParts(context, parts, from, y, wide, ratio);
      if (wide > 20 && state.highlight === null) drawLabel(context, panel, bars, group, parts, from, to, y);
      for (let at = group.first; state.selected && at <= group.last; at += 1) {
        if (isSelected(panel, bars, at)) outlined.push([Math.max(plot.left, x(bars.start[at])), Math.min(plot.right, x(bars.end[at]))]);
      }
    }
    context.strokeStyle = colourOf("text");
    context.lineWidth = 3;
    for (const [from, to] of outlined) context.strokeRect(from + 1, y + 1.5, Math.max(2, to - from - 2), ROW - 3);
  }

  /** Draw the categories of a group one below the other; others than the highlighted one are faint. */
  function drawParts(context, parts, from, y, wide, ratio) {
    const chosen = parts.filter((part) => part.category === state.highlight);
    const rest = { category: parts.length > 1 ? null : parts[0].category, share: 1 - (chosen.length ? chosen[0].share : 0) };
    let top = y;
    for (const part of state.highlight === null ? parts : [...chosen, rest]) {
      if (!(part.share > 1e-9)) continue;
      const bottom = top + part.share * ROW, isLast = bottom > y + ROW - 1;
      context.globalAlpha = state.highlight === null || part.category === state.highlight ? 1 : 0.15;
      context.fillStyle = fillOf(context, part.category, ratio);
      context.fillRect(from, top, wide, (isLast ? y + ROW : bottom - 1) - top);
      top = bottom;
    }
    context.globalAlpha = 1;
  }

  /** Write a bar's name on it, or on a block the number of its bars after the name of its only category. */
  function drawLabel(context, panel, bars, group, parts, from, to, y) {
    const count = group.last - group.first + 1, isPlain = parts.length === 1, room = to - from - 8;
    const [colour, hatch] = markOf(parts[0].category), category = isPlain ? parts[0].category : null;
    const known = category === null || category < 0 ? "" : data.schemes[state.scheme].names[category];
    const layer = known.slice(known.lastIndexOf("/") + 1);
    const texts = count > 1 ? [(layer + " ×" + count).trim(), "×" + count] : [shortName(barName(panel, bars, group.first)), layer];
    const text = texts.find((found) => found && context.measureText(found).width <= room) || shorten(context, layer || texts[0], room);
    if (!text) return;
    if (!isPlain || hatch) {
      context.fillStyle = isPlain ? colour : colourOf("background");
      context.fillRect(from + 2, y + 7, context.measureText(text).width + 5, ROW - 14);
    }
    context.fillStyle = isPlain ? inkOn(colour) : colourOf("text");
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(text, from + 4, y + ROW / 2);
  }

  /** Return the beginning of a text that fits, with an ellipsis; empty if too little does. */
  function shorten(context, text, room) {
    const letters = Math.floor(room / 7) - 1, short = text.slice(0, letters) + "…";
    return letters >= 3 && context.measureText(short).width <= room ? short : "";
  }

  function drawLine(context, plot, x, ms, label, colour, dash, baseline) {
    const at = x(ms), visible = at >= plot.left && at <= plot.right;
    context.fillStyle = context.strokeStyle = colour;
    context.textBaseline = "alphabetic";
    if (visible) {
      context.setLineDash(dash);
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(at, plot.top - 4);
      context.lineTo(at, plot.bottom + 3);
      context.stroke();
      context.setLineDash([]);
      const wide = context.measureText(label).width;
      context.textAlign = at + wide + 8 > plot.right ? "right" : "left";
      context.fillText(label, at + (context.textAlign === "right" ? -5 : 5), baseline);
    } else {
      context.textAlign = at > plot.right ? "right" : "left";
      context.fillText(at > plot.right ? label + " →" : "← " + label, at > plot.right ? plot.right : plot.left, baseline);
    }
  }

  // -- Bars

  /** Return the lines that describe the group of bars that is drawn where a bar is. */
  function describe(panel, found) {
    const bars = panel.lanes[found.lane], group = groupAt(panel, found);
    if (group.first === group.last) return barName(panel, bars, found.bar) + "\n" + timesOf(panel.chart, bars.span[found.bar]);
    const { parts, categories } = sharesOf(bars, group, (at) => categoryOf(panel, bars, at), 0);
    const kind = state.scheme === "type" ? "operator types" : "layers", names = data.schemes[state.scheme].names;
    const largest = parts.filter((part) => part.category >= 0).sort((one, other) => other.share - one.share).slice(0, 3);
    const shares = largest.map((part) => names[part.category] + " " + Math.round(100 * part.share) + " %").join(", ");
    const count = group.last - group.first + 1;
    return count + " bars" + (categories > 1 ? " of " + categories + " " + kind : "") + (shares ? ": " + shares : "") +
      (categories > largest.length ? ", …" : "") + "\n" + rangeText(group.start, group.end) + "; click to zoom in";
  }
  const groupAt = (panel, found) => groupsOf(panel, found.lane).find((group) => group.last >= found.bar);

  function barName(panel, bars, at) {
    const span = bars.span[at], { spans } = panel.chart;
    if (spans.segment[span] < 0) return spans.copied[span];
    const members = data.segments[spans.segment[span]];
    const name = data.operators.name[bars.operator[at]];
    return members.length > 1 && !data.operators.predicted_ms ? name + " +" + (members.length - 1) : name;
  }

  function isSelected(panel, bars, at) {
    const { selected } = state, span = bars.span[at];
    if (!selected) return false;
    if (selected.operator < 0) return selected.panel === panel.index && selected.span === span;
    return panel.chart.spans.segment[span] === segmentOf[selected.operator] &&
      (bars.operator[at] === selected.operator || !data.operators.predicted_ms);
  }

  function barAt(panel, clientX, clientY) {
    const box = panel.canvas.getBoundingClientRect(), { plot, view } = panel;
    const row = Math.floor((clientY - box.top - HEAD) / (ROW + GAP)), px = clientX - box.left;
    if (row < 0 || row >= panel.lanes.length || px < plot.left || px > plot.right) return null;
    const scale = (view.end - view.start) / (plot.right - plot.left), bars = panel.lanes[row];
    const ms = view.start + (px - plot.left) * scale;
    for (const slack of [0, 2 * scale]) {  // a bar thinner than a pixel can be hit as well
      for (let at = firstAbove(bars.reach, ms - slack); at < bars.start.length && bars.start[at] <= ms + slack; at += 1) {
        if (bars.end[at] >= ms - slack) return { lane: row, bar: at };
      }
    }
    return null;
  }

  function select(panel, found) {
    panel.cursor = found;
    const bars = panel.lanes[found.lane];
    selectOperator(bars.operator[found.bar], panel.index, bars.span[found.bar]);
  }
  function selectOperator(operator, panel, span) {
    state.selected = { operator, panel, span };
    showDetails();
    requestDraw();
  }
  function clearSelection() {
    state.selected = null;
    byId("details").replaceChildren(element("p", "Select a bar to see its operators.", { class: "hint" }));
    requestDraw();
  }

  // -- Details

  function showDetails() {
    const { operator, panel, span } = state.selected, box = byId("details"), list = element("dl");
    const row = (term, text) => list.append(element("dt", term), element("dd", text));
    if (operator < 0) {
      const { spans, lanes } = data.charts[panel];
      box.replaceChildren(element("h2", "Copy of " + spans.copied[span]), list);
      row("lane", lanes[spans.lane[span]].name);
      row("measured", timesOf(data.charts[panel], span));
      return;
    }
    const { operators } = data, segment = segmentOf[operator], members = data.segments[segment];
    box.replaceChildren(element("h2", operators.name[operator]), list);
    if (operators.type) row("type", operators.type[operator]);
    for (const scheme of ["layer"]) row(scheme, data.schemes[scheme].names[data.schemes[scheme].of_operator[operator]]);
    row("lane", operators.lane[operator]);
    row("segment", segment + (members.length > 1 ? ", " + members.length + " operators" : ", this operator alone"));
    if (operators.predicted_ms) row("predicted, operator", formatMs(operators.predicted_ms[operator]));
    const names = { predicted: "predicted, segment", estimated: "estimated, segment", measured: "measured, segment" };
    data.charts.forEach((chart, at) => {
      const found = segmentSpans[at].get(segment);
      row(names[chart.title] || chart.title, found === undefined ? "not known" : timesOf(chart, found));
    });
    if (operators.input_bytes) {
      row("inputs", formatBytes(operators.input_bytes[operator]));
      row("outputs", formatBytes(operators.output_bytes[operator]));
      row("weights", formatBytes(operators.weight_bytes[operator]));
    }
    const why = placement(operator);
    if (why) row("placement", why);
    if (members.length > 1) box.append(memberTable(members, operator));
  }

  const timesOf = (chart, span) => rangeText(chart.spans.start_ms[span], chart.spans.end_ms[span]);
  function rangeText(start, end) {
    const range = Math.max(end - start, 1e-6);
    return formatMs(end - start) + ", from " + formatTime(start, range) + " to " + formatTime(end, range);
  }

  /** Return the costs of an operator on both devices; the search for a plan also considers copies and memory. */
  function placement(operator) {
    const { cpu_ms: cpu, accelerator_ms: accelerator } = data.operators;
    if (!cpu) return "";
    const own = "one core takes " + formatMs(cpu[operator]);
    if (!accelerator) return own + "; the profile has no accelerator";
    const other = accelerator[operator] === null ? "the accelerator cannot run it" : "the accelerator takes " + formatMs(accelerator[operator]);
    return own + ", " + other + " (chrion partition --explain shows the cost of moving it)";
  }

  function memberTable(members, chosen) {
    const { operators } = data, frame = element("div", undefined, { class: "members" }), table = element("table");
    const columns = ["operator", ...(operators.type ? ["type"] : []), ...(operators.predicted_ms ? ["predicted"] : []), ...(operators.output_bytes ? ["outputs"] : [])];
    const head = element("tr");
    columns.forEach((name, at) => head.append(element("th", name, at > 0 && name !== "type" ? { class: "number" } : {})));
    table.append(head);
    const shown = members.slice(0, 500);
    for (const i of shown) {
      const line = element("tr"), name = element("td"), button = element("button", operators.name[i], { type: "button" });
      if (i === chosen) button.style.fontWeight = "bold";
      button.addEventListener("click", () => selectOperator(i, 0, -1));
      name.append(button);
      line.append(name);
      if (operators.type) line.append(element("td", operators.type[i]));
      if (operators.predicted_ms) line.append(element("td", formatMs(operators.predicted_ms[i]), { class: "number" }));
      if (operators.output_bytes) line.append(element("td", formatBytes(operators.output_bytes[i]), { class: "number" }));
      table.append(line);
    }
    frame.append(table);
    if (shown.length < members.length) frame.append(element("p", "and " + (members.length - shown.length) + " more operators", { class: "hint" }));
    return frame;
  }

  // -- Legend and controls

  function showLegend() {
    const list = byId("legend"), scheme = data.schemes[state.scheme];
    list.replaceChildren();
    byId("legend-title").textContent = state.scheme === "type" ? "Operator types" : "Layers";
    byId("legend-title").append(" ", element("small", "of predicted time"));
    const add = (category, name, share) => {
      const item = element("li"), pressed = state.highlight === category;
      const button = element("button", undefined, { type: "button", "aria-pressed": String(pressed) });
      const swatch = element("canvas", undefined, { "aria-hidden": "true" }), ratio = window.devicePixelRatio || 1;
      swatch.width = Math.round(22 * ratio);
      swatch.height = Math.round(14 * ratio);
      const context = swatch.getContext("2d");
      context.scale(ratio, ratio);
      context.fillStyle = fillOf(context, category, ratio);
      context.fillRect(0, 0, 22, 14);
      button.append(swatch, element("span", name, { class: "name" }), element("span", share, { class: "share" }));
      button.addEventListener("click", () => {
        state.highlight = pressed ? null : category;
        showLegend();
        requestDraw();
      });
      item.append(button);
      list.append(item);
    };
    const percent = (share) => (share > 0 && share < 0.001 ? "< 0.1 %" : (100 * share).toFixed(1) + " %");
    scheme.names.forEach((name, category) => add(category, name, percent(scheme.shares[category])));
    if (data.charts.some((chart) => chart.lanes.some((lane) => lane.copies))) add(-1, "copies", "");
  }

  for (const name of Object.keys(data.schemes)) {
    const label = element("label"), input = element("input", undefined, { type: "radio", name: "scheme", value: name });
    input.checked = name === state.scheme;
    input.addEventListener("change", () => {
      state.scheme = name;
      state.highlight = null;
      showLegend();
      requestDraw();
    });
    label.append(input, " " + (name === "type" ? "operator type" : "layer"));
    byId("colour-by").append(label);
  }
  byId("share-scale").checked = state.shared;
  byId("share-scale").disabled = panels.length < 2;
  byId("share-scale").addEventListener("change", (event) => {
    state.shared = event.target.checked;
    resetViews();
  });
  const zoomAll = (factor) => {
    for (const panel of state.shared ? panels.slice(0, 1) : panels) setView(panel, zoomed(panel.view, 0.5, factor, totalOf(panel)));
  };
  byId("zoom-in").addEventListener("click", () => zoomAll(0.5));
  byId("zoom-out").addEventListener("click", () => zoomAll(2));
  byId("reset").addEventListener("click", resetViews);

  let lastFound = -1;
  byId("find").addEventListener("input", () => { lastFound = -1; byId("found").textContent = ""; });
  byId("find-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = byId("find").value.toLowerCase(), names = data.operators.name, matches = [];
    if (!wanted) return;
    names.forEach((name, i) => { if (name.toLowerCase().includes(wanted)) matches.push(i); });
    byId("found").textContent = matches.length ? "" : "no operator";
    if (!matches.length) return;
    const next = Math.max(0, matches.findIndex((i) => i > lastFound));
    lastFound = matches[next];
    byId("found").textContent = next + 1 + " of " + matches.length;
    selectOperator(lastFound, 0, -1);
    for (const panel of panels) reveal(panel, segmentSpans[panel.index].get(segmentOf[lastFound]));
  });

  /** Move a panel's view so that a span is visible. */
  function reveal(panel, span) {
    if (span === undefined) return;
    const { spans } = panel.chart, middle = (spans.start_ms[span] + spans.end_ms[span]) / 2, { view } = panel;
    if (spans.start_ms[span] < view.end && spans.end_ms[span] > view.start) return;
    setView(panel, moved(view, middle - (view.start + view.end) / 2, totalOf(panel)));
  }

  // -- Mouse, touch and keyboard

  for (const panel of panels) {
    const { canvas } = panel, tooltip = byId("tooltip");
    const shareOf = (clientX) => {
      const box = canvas.getBoundingClientRect(), { plot } = panel;
      return Math.min(1, Math.max(0, (clientX - box.left - plot.left) / (plot.right - plot.left)));
    };
    const msOf = (pixels) => (pixels / (panel.plot.right - panel.plot.left)) * (panel.view.end - panel.view.start);
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      tooltip.hidden = true;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        setView(panel, moved(panel.view, msOf(event.deltaX || event.deltaY), totalOf(panel)));
      } else {
        const factor = Math.exp(Math.max(-300, Math.min(300, event.deltaY)) * 0.0018);
        setView(panel, zoomed(panel.view, shareOf(event.clientX), factor, totalOf(panel)));
      }
    }, { passive: false });

    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      drag = { x: event.clientX, view: panel.view, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        drag.moved = drag.moved || Math.abs(event.clientX - drag.x) > 3;
        if (drag.moved) {
          canvas.classList.add("dragging");
          setView(panel, moved(drag.view, -msOf(event.clientX - drag.x), totalOf(panel)));
        }
        tooltip.hidden = true;
        return;
      }
      const found = barAt(panel, event.clientX, event.clientY);
      tooltip.hidden = !found;
      if (!found) return;
      tooltip.textContent = describe(panel, found);
      tooltip.style.left = Math.min(event.clientX + 12, window.innerWidth - tooltip.offsetWidth - 8) + "px";
      tooltip.style.top = event.clientY + 16 + "px";
    });
    canvas.addEventListener("pointerup", (event) => {
      canvas.classList.remove("dragging");
      const clicked = drag && !drag.moved;
      drag = null;
      if (!clicked) return;
      const found = barAt(panel, event.clientX, event.clientY);
      const group = found && groupAt(panel, found);
      if (!found) clearSelection();
      else if (group.first === group.last) select(panel, found);
      else setView(panel, moved({ start: group.start, end: Math.max(group.end, group.start + 1e-5) }, 0, totalOf(panel)));
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => { tooltip.hidden = true; });
    canvas.addEventListener("dblclick", resetViews);

    const step = (bars) => {
      const lane = panel.lanes[panel.cursor.lane], bar = panel.cursor.bar + bars;
      if (bar < 0 || bar >= lane.start.length) return;
      select(panel, { lane: panel.cursor.lane, bar });
      reveal(panel, lane.span[bar]);
    };
    const changeLane = (lanes) => {
      const lane = panel.cursor.lane + lanes;
      if (lane < 0 || lane >= panel.lanes.length) return;
      const now = panel.lanes[panel.cursor.lane], ms = now.start[panel.cursor.bar] || 0, bars = panel.lanes[lane];
      const bar = Math.min(firstAbove(bars.reach, ms), bars.start.length - 1);
      select(panel, { lane, bar });
      reveal(panel, bars.span[bar]);
    };
    const keys = {
      "+": () => setView(panel, zoomed(panel.view, 0.5, 0.5, totalOf(panel))),
      "-": () => setView(panel, zoomed(panel.view, 0.5, 2, totalOf(panel))),
      ArrowLeft: () => setView(panel, moved(panel.view, -(panel.view.end - panel.view.start) / 8, totalOf(panel))),
      ArrowRight: () => setView(panel, moved(panel.view, (panel.view.end - panel.view.start) / 8, totalOf(panel))),
      ArrowUp: () => changeLane(-1),
      ArrowDown: () => changeLane(1),
      ",": () => step(-1),
      ".": () => step(state.selected ? 1 : 0),
      Home: resetViews,
      Escape: clearSelection,
    };
    keys["="] = keys["+"];
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    new window.ResizeObserver(requestDraw).observe(canvas);
  }

  showLegend();
  resetViews();
  // For tests and for the browser's console.
  window.chrionTimeline = { data, state, panels, barAt, makeTicks, niceStep, formatMs, formatBytes, zoomed, moved };
}

if (typeof document !== "undefined") startPage(document, window);
