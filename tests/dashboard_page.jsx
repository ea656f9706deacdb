// The panels of a Grafana dashboard, evaluated by Prometheus and drawn with Grafana's own components. What is Grafana's
// server's, and its application's, is done here: variables and intervals are put into the queries, series get their
// names, panels their places. dashboard_picture.mjs says how it is used.

import { FieldType, ThemeContext, createTheme, dateMath, getDisplayProcessor, rangeUtil } from "@grafana/data";
import * as ui from "@grafana/ui";
import { createRoot } from "react-dom/client";

const MARGIN = 16;
const ROW = 30; // of the grid, in pixels, and the space between its rows and columns
const GAP = 8;
const SCRAPE_S = 15; // what Grafana takes for a data source that does not say otherwise
const CUSTOM = { lineWidth: 1, fillOpacity: 0, pointSize: 5, showPoints: "auto", lineInterpolation: "linear" };
const COLOR = { mode: "palette-classic" };
const NOTHING = () => {};

const theme = createTheme({ colors: { mode: "dark" } });
const dashboard = await (await fetch("/dashboard.json")).json();
const raw = { ...dashboard.time, ...Object.fromEntries(new URLSearchParams(location.search)) };
const range = { raw, from: dateMath.toDateTime(raw.from, {}), to: dateMath.toDateTime(raw.to, { roundUp: true }) };

async function ask(path, parameters) {
  const answer = await (await fetch(`/prometheus/api/v1/${path}?${new URLSearchParams(parameters)}`)).json();
  if (answer.status !== "success") throw new Error(`${path}: ${answer.error}`);
  return answer.data;
}

const fill = (text, values) => text.replace(/\$(\w+)/g, (whole, name) => values[name] ?? whole);

/** What each variable stands for in queries: all are at "All". One that finds nothing is a mistake. */
async function variables() {
  const values = {};
  for (const { name, query, current, allValue } of dashboard.templating.list.filter(({ type }) => type === "query")) {
    const [, metric, label] = /^label_values\((.*),\s*(\w+)\)$/.exec(query.query);
    const found = await ask(`label/${label}/values`, { "match[]": fill(metric, values) });
    if (!found.length || current.value !== "$__all") throw new Error(`variable ${name}`);
    values[name] = allValue;
  }
  return values;
}

/** The frames of a panel, one for each series, with the settings that Grafana gives their fields. */
async function frames({ title, fieldConfig, gridPos, targets }, values) {
  if (fieldConfig.overrides.length) throw new Error(`${title}: overrides are not drawn`);
  const { intervalMs } = rangeUtil.calculateInterval(range, Math.round(place(gridPos).width), `${SCRAPE_S}s`);
  const step = intervalMs / 1000;
  const intervals = { __interval: `${step}s`, __rate_interval: `${Math.max(step + SCRAPE_S, 4 * SCRAPE_S)}s` };
  const [start, end] = [range.from, range.to].map((time) => Math.floor(time.valueOf() / intervalMs) * step);
  const custom = { ...CUSTOM, ...fieldConfig.defaults.custom };
  const field = (more) => {
    more.display = getDisplayProcessor({ field: more, theme, timeZone: "browser" });
    return more;
  };
  const drawn = [];
  for (const { refId, expr, legendFormat } of targets) {
    const query = fill(expr, { ...values, ...intervals });
    if (query.includes("$")) throw new Error(`${title}: ${query}`);
    for (const { metric, values: points } of (await ask("query_range", { query, start, end, step })).result) {
      const name = legendFormat.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => metric[label] ?? label);
      const times = points.map(([time]) => time * 1000);
      const numbers = points.map(([, text]) => (Number.isFinite(Number(text)) ? Number(text) : null));
      const config = { color: COLOR, ...fieldConfig.defaults, custom, displayName: name };
      const fields = [
        field({ name: "Time", type: FieldType.time, values: times, config: { interval: intervalMs } }),
        field({ name, type: FieldType.number, values: numbers, config, state: { seriesIndex: drawn.length } }),
      ];
      drawn.push({ refId, fields, length: times.length });
    }
  }
  return drawn;
}

function place({ x, y, w, h }) {
  const column = (innerWidth - 2 * MARGIN + GAP) / 24;
  return { left: x * column, top: y * (ROW + GAP), width: w * column - GAP, height: h * (ROW + GAP) - GAP };
}

function Row({ panel }) {
  return (
    <div style={{ ...place(panel.gridPos), position: "absolute", display: "flex", alignItems: "center", gap: 8 }}>
      <ui.Icon name="angle-down" />
      <span style={theme.typography.h5}>{panel.title}</span>
    </div>
  );
}

function Panel({ panel: { title, description, gridPos, options }, data }) {
  const { left, top, width, height } = place(gridPos);
  const common = { timeRange: range, timeZone: "browser", options, legend: { showLegend: true, ...options.legend } };
  const empty = { textAlign: "center", color: theme.colors.text.secondary };
  return (
    <div style={{ position: "absolute", left, top }}>
      <ui.PanelChrome {...{ title, description, width, height }}>
        {(inner, high) =>
          data.length ? (
            <ui.TimeSeries {...common} frames={data} width={inner} height={high} />
          ) : (
            <div style={{ ...empty, lineHeight: `${high}px` }}>No data</div>
          )
        }
      </ui.PanelChrome>
    </div>
  );
}

function Dashboard({ drawn }) {
  const bottom = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  const down = <ui.Icon name="angle-down" />;
  const moves = { onMoveBackward: NOTHING, onMoveForward: NOTHING, onZoom: NOTHING, onChangeTimeZone: NOTHING };
  return (
    <ThemeContext.Provider value={theme}>
      <ui.GlobalStyles />
      <div style={{ padding: MARGIN }}>
        <h3>{dashboard.title}</h3>
        <div style={{ display: "flex", gap: 8, height: 48 }}>
          {dashboard.templating.list.map(({ name, label, current }) => (
            <ui.InlineField key={name} label={label}>
              <ui.Input width={20} readOnly value={current?.text ?? "Prometheus"} suffix={down} />
            </ui.InlineField>
          ))}
          <span style={{ flexGrow: 1 }} />
          <ui.TimeRangePicker value={range} onChange={NOTHING} {...moves} timeZone="browser" />
          <ui.RefreshPicker value={dashboard.refresh} onIntervalChanged={NOTHING} onRefresh={NOTHING} />
        </div>
        <div style={{ position: "relative", height: bottom * (ROW + GAP) }}>
          {drawn.map((each) => ((Kind) => <Kind key={each.panel.id} {...each} />)(each.data ? Panel : Row))}
        </div>
      </div>
    </ThemeContext.Provider>
  );
}

async function main() {
  const root = createRoot(document.body.appendChild(document.createElement("div")));
  root.render(<Dashboard drawn={[]} />);
  await new Promise((seen) => setTimeout(seen, 500)); // now the styles are there, which name the fonts
  await Promise.all([400, 500].map((weight) => document.fonts.load(`${weight} 12px Inter`))); // charts measure texts
  const values = await variables();
  const drawn = [];
  for (const panel of dashboard.panels) {
    if (!["row", "timeseries"].includes(panel.type)) throw new Error(`${panel.title}: ${panel.type} is not drawn`);
    drawn.push({ panel, data: panel.type === "row" ? undefined : await frames(panel, values) });
  }
  root.render(<Dashboard drawn={drawn} />);
  window.empty = drawn.filter(({ data }) => data?.length === 0).map(({ panel }) => panel.title);
}

main().catch((problem) => (window.problem = `${problem.stack}`));
