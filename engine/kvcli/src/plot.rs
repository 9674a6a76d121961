//! Plots in SVG files.

use std::path::Path;

use kvengine::ResultFile;
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::error::{Error, Result};

/// Points of one kind, joined by a line in the order of the list.
pub(crate) struct Series {
    pub(crate) name: String,
    /// `(x, y, half the height of the error bar)`.
    pub(crate) points: Vec<(f64, f64, f64)>,
}

/// A plot's title, axis labels and ranges.
pub(crate) struct Frame<'a> {
    pub(crate) title: &'a str,
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    pub(crate) x_range: std::ops::Range<f64>,
    pub(crate) y_range: std::ops::Range<f64>,
    pub(crate) legend: Legend,
}

/// The vertical position of the legend, at the right edge of the plot. The caller chooses a position where no
/// lines are.
#[derive(Clone, Copy)]
pub(crate) enum Legend {
    Above,
    Middle,
    Below,
}

/// The colours of the lines: six that people with colour blindness can distinguish (Okabe and Ito, 2008), and
/// three more.
const COLOURS: [(u8, u8, u8); 9] = [
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (90, 90, 90),
    (120, 60, 160),
    (140, 100, 40),
];

/// The width and height of a panel.
const PANEL: (u32, u32) = (640, 480);

/// Opens a file of results. Call this before the results are computed.
pub(crate) fn result_file(path: &Path) -> Result<ResultFile> {
    ResultFile::open(path)
        .map_err(|error| Error::Results { path: path.to_owned(), reason: error.to_string() })
}

/// Draws the panels side by side, each with its series, error bars and legend.
pub(crate) fn draw(file: ResultFile, panels: &[(Frame<'_>, Vec<Series>)]) -> Result<()> {
    let path = file.path().to_owned();
    let written = svg(panels).and_then(|svg| Ok(file.write(&svg)?));
    written.map_err(|reason| Error::Results { path, reason: reason.to_string() })
}

fn svg(panels: &[(Frame<'_>, Vec<Series>)]) -> std::result::Result<String, Box<dyn std::error::Error>> {
    let ((width, height), mut text) = (PANEL, String::new());
    let count = panels.len().max(1);
    {
        let root = SVGBackend::with_string(&mut text, (width * count as u32, height)).into_drawing_area();
        root.fill(&WHITE)?;
        for (area, (frame, series)) in root.split_evenly((1, count)).iter().zip(panels) {
            panel(area, frame, series)?;
        }
        root.present()?;
    }
    Ok(text)
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    frame: &Frame<'_>,
    series: &[Series],
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut chart = ChartBuilder::on(area)
        .caption(frame.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(60)
        .build_cartesian_2d(frame.x_range.clone(), frame.y_range.clone())?;
    chart.configure_mesh().x_desc(frame.x).y_desc(frame.y).light_line_style(WHITE).draw()?;
    for (i, one) in series.iter().enumerate() {
        let (r, g, b) = COLOURS[i % COLOURS.len()];
        let colour = RGBColor(r, g, b).to_rgba();
        let line = one.points.iter().map(|&(x, y, _)| (x, y));
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(2)))?
            .label(one.name.clone())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(one.points.iter().map(|&(x, y, _)| Circle::new((x, y), 3, colour.filled())))?;
        let bars = one.points.iter().filter(|point| point.2 > 0.0);
        chart.draw_series(
            bars.map(|&(x, y, half)| PathElement::new([(x, y - half), (x, y + half)], colour)),
        )?;
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .position(match frame.legend {
            Legend::Above => SeriesLabelPosition::UpperRight,
            Legend::Middle => SeriesLabelPosition::MiddleRight,
            Legend::Below => SeriesLabelPosition::LowerRight,
        })
        .draw()?;
    Ok(())
}
