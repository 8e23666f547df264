// Draws the panels of a dashboard with Grafana's own components, from what Prometheus answered to their queries.
// There is no Grafana server: what one would make of the dashboard's JSON beyond the panels is not shown.
//
// window.INPUT: {dashboard, answers: {panel's id: [{refId, legend, result}]}, startS, endS}; result as in Prometheus's API.
import { createRoot } from "react-dom/client";
import { createTheme, dateTime, FieldType, getDisplayProcessor, ThemeContext, toDataFrame } from "@grafana/data";
import { BigValue, BigValueColorMode, BigValueGraphMode, GlobalStyles, PanelChrome, TimeSeries } from "@grafana/ui";

const theme = createTheme({ colors: { mode: "dark" } });
const COLUMN = 50; // pixels of one of a row's 24 columns
const LINE = 36; // and of a line, of which most panels have eight
const GAP = 8;
// What Grafana's panel for time series takes where the dashboard says nothing.
const DRAWN = { drawStyle: "line", lineWidth: 1, showPoints: "auto", pointSize: 5, axisPlacement: "auto" };

function nameOf(legend, labels) {
  return legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? "");
}

function frameOf(panel, refId, legend, { metric, values }, seriesIndex) {
  const { custom, ...defaults } = panel.fieldConfig.defaults;
  const displayName = nameOf(legend, metric);
  const config = { ...defaults, displayName, color: { mode: "palette-classic" }, custom: { ...DRAWN, ...custom } };
  const numbers = values.map(([, value]) => (Number.isFinite(Number(value)) ? Number(value) : null));
  const frame = toDataFrame({
    refId,
    fields: [
      { name: "Time", type: FieldType.time, config: {}, values: values.map(([atS]) => atS * 1000) },
      { name: "Value", type: FieldType.number, config, labels: metric, values: numbers },
    ],
  });
  frame.fields[1].state = { seriesIndex, displayName };
  for (const field of frame.fields) field.display = getDisplayProcessor({ field, theme });
  return frame;
}

function framesOf(panel, answers) {
  const series = answers.flatMap(({ refId, legend, result }) => result.map((one) => [refId, legend, one]));
  return series.map((one, index) => frameOf(panel, ...one, index));
}

function Content({ panel, frames, range, width, height }) {
  if (!frames.length) return <div style={{ textAlign: "center" }}>No data</div>;
  if (panel.type === "stat") {
    const [time, field] = frames[0].fields;
    const last = field.values.findLast((value) => value !== null);
    return (
      <BigValue
        value={field.display(last)} sparkline={{ x: time, y: field }} theme={theme} width={width} height={height}
        colorMode={BigValueColorMode.None} graphMode={BigValueGraphMode.Area}
      />
    );
  }
  return (
    <TimeSeries
      frames={frames} timeRange={range} timeZone="utc" width={width} height={height}
      legend={panel.options.legend} options={{}}
    />
  );
}

function Panel({ panel, answers, range }) {
  const { w, h } = panel.gridPos;
  const frames = framesOf(panel, answers);
  return (
    <PanelChrome title={panel.title} width={w * COLUMN - GAP} height={h * LINE - GAP}>
      {(width, height) => <Content {...{ panel, frames, range, width, height }} />}
    </PanelChrome>
  );
}

const { dashboard, answers, startS, endS } = window.INPUT;
const [from, to] = [dateTime(startS * 1000), dateTime(endS * 1000)];
const range = { from, to, raw: { from, to } };
const row = { fontSize: 16, lineHeight: `${LINE}px` };

Object.assign(document.body.style, {
  margin: `${GAP}px`,
  background: theme.colors.background.canvas,
  color: theme.colors.text.primary,
  font: "14px sans-serif",
});
createRoot(document.body.appendChild(document.createElement("div"))).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    {dashboard.panels.map((panel) => (
      <div
        key={panel.id} id={`panel-${panel.id}`}
        style={{ position: "absolute", left: panel.gridPos.x * COLUMN + GAP, top: panel.gridPos.y * LINE + GAP }}
      >
        {panel.type === "row" ? (
          <div style={row}>{panel.title}</div>
        ) : (
          <Panel panel={panel} answers={answers[panel.id]} range={range} />
        )}
      </div>
    ))}
  </ThemeContext.Provider>
);
