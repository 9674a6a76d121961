//! The plot of right answers against time to first token, with a panel for each model.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::FULL;

/// A strategy's result: its name, its time to first token relative to full attention's, and the share of right
/// answers, both in percent.
#[derive(Clone)]
pub(super) struct PlotPoint {
    pub(super) name: String,
    pub(super) time: f64,
    pub(super) right: f64,
}

/// A panel: its title, and its points.
pub(super) struct PlotPanel {
    pub(super) title: String,
    pub(super) points: Vec<PlotPoint>,
}

/// The families of strategies, with their colours (Okabe and Ito, 2008).
const FAMILIES: [(&str, RGBColor); 4] = [
    ("full attention", RGBColor(0, 0, 0)),
    ("tokens recomputed", RGBColor(0, 114, 178)),
    ("nothing recomputed", RGBColor(213, 94, 0)),
    ("behind decoys, nothing recomputed", RGBColor(0, 158, 115)),
];

/// Returns the index of a strategy's family.
fn family(name: &str) -> usize {
    let decoys = name.contains("behind") || name.contains("slots");
    match name {
        FULL => 0,
        _ if !name.ends_with(", none") => 1,
        _ if decoys => 3,
        _ => 2,
    }
}

/// Returns the points for which no other point is as fast and has as many right answers, ordered by time.
fn front(points: &[PlotPoint]) -> Vec<(f64, f64)> {
    let mut sorted: Vec<(f64, f64)> = points.iter().map(|point| (point.time, point.right)).collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
    let mut best = f64::NEG_INFINITY;
    sorted.retain(|&(_, right)| {
        let better = right > best;
        best = best.max(right);
        better
    });
    sorted
}

/// The width and height of a panel.
const PANEL: (u32, u32) = (420, 340);

/// The labelled times.
const TIMES: [f64; 5] = [5.0, 10.0, 20.0, 50.0, 100.0];

type Drawn = Result<(), Box<dyn std::error::Error>>;

/// Draws the panels side by side.
pub(super) fn draw(path: &Path, panels: &[PlotPanel]) -> Result<(), String> {
    try_draw(path, panels).map_err(|error| format!("{}: {error}", path.display()))
}

fn try_draw(path: &Path, panels: &[PlotPanel]) -> Drawn {
    let count = panels.len().max(1);
    let root = SVGBackend::new(path, (PANEL.0 * count as u32, PANEL.1)).into_drawing_area();
    root.fill(&WHITE)?;
    for (number, (area, panel)) in root.split_evenly((1, count)).iter().zip(panels).enumerate() {
        // One legend is enough, in the panel on the right.
        draw_panel(area, panel, number + 1 == panels.len())?;
    }
    root.present()?;
    Ok(())
}

fn draw_panel(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &PlotPanel, legend: bool) -> Drawn {
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 16))
        .margin(8)
        .x_label_area_size(38)
        .y_label_area_size(42)
        .build_cartesian_2d((2.5..125.0).log_scale().with_key_points(TIMES.to_vec()), 0.0..102.0)?;
    chart
        .configure_mesh()
        .x_desc("time to first token, % of full attention's")
        .y_desc("right answers, %")
        .max_light_lines(0)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .draw()?;
    let mut steps: Vec<(f64, f64)> = Vec::new();
    for (time, right) in front(&panel.points) {
        steps.extend(steps.last().map(|&(_, before)| (time, before)));
        steps.push((time, right));
    }
    chart.draw_series(LineSeries::new(steps, BLACK.mix(0.5).stroke_width(2)))?;
    for (number, (name, colour)) in FAMILIES.into_iter().enumerate() {
        let members = panel.points.iter().filter(|point| family(&point.name) == number);
        let drawn = members.map(|point| Circle::new((point.time, point.right), 4, colour.filled()));
        chart.draw_series(drawn)?.label(name).legend(move |at| Circle::new(at, 4, colour.filled()));
    }
    if legend {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.3))
            .draw()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_has_the_points_that_nothing_beats() {
        let point = |time, right| PlotPoint { name: String::new(), time, right };
        let points =
            [point(100.0, 50.0), point(5.0, 20.0), point(50.0, 50.0), point(5.0, 30.0), point(20.0, 25.0)];
        assert_eq!(front(&points), [(5.0, 30.0), (50.0, 50.0)]);
    }

    #[test]
    fn each_strategy_has_its_family() {
        for (name, number) in [
            (FULL, 0),
            ("sequential, with-system, question:0.5", 1),
            ("sequential, behind:7, question:0.1", 1),
            ("sequential, alone, none", 2),
            ("sequential, slots:4, none", 3),
        ] {
            assert_eq!(family(name), number, "{name}");
        }
    }
}
