//! Plots of the sweeps: ratio to the limit against size, one file per family.

use std::error::Error;
use std::path::Path;

use kvbench::rows::{BenchRow, Sweep};
use plotters::prelude::*;
use xtask::run::Result;

/// Sweeps drawn in one plot.
struct Figure {
    file: &'static str,
    title: &'static str,
    /// Returns true for a row that belongs in this figure. If several figures match, the row belongs to the
    /// first one.
    has: fn(&BenchRow) -> bool,
}

const FAMILIES: [Figure; 13] = [
    Figure {
        file: "cuda-moves",
        title: "cuda: what moves rows as they are",
        has: |r| {
            let moves = ["cuda: scatter", "cuda: gather", "cuda: copy", "cuda: swap"];
            moves.iter().any(|kernel| r.what.starts_with(kernel))
        },
    },
    Figure { file: "cuda-kernels", title: "cuda: other kernels", has: |r| r.what.starts_with("cuda:") },
    Figure {
        file: "wgpu-moves",
        title: "wgpu: what moves rows as they are",
        has: |r| {
            let moves = ["wgpu: scatter", "wgpu: gather", "wgpu: copy", "wgpu: swap"];
            moves.iter().any(|kernel| r.what.starts_with(kernel))
        },
    },
    Figure { file: "wgpu-kernels", title: "wgpu: other kernels", has: |r| r.what.starts_with("wgpu:") },
    Figure {
        file: "moves",
        title: "scatter, gather and copy_blocks",
        has: |r| ["scatter", "gather", "copy_blocks"].iter().any(|kernel| r.what.starts_with(kernel)),
    },
    Figure {
        file: "copy-tensor",
        title: "copy_tensor into other orders of axes",
        has: |r| r.what.starts_with("copy_tensor"),
    },
    Figure {
        file: "rotation",
        title: "rope and rotate_keys",
        has: |r| r.what.starts_with("rope") || r.what.starts_with("rotate_keys"),
    },
    Figure {
        file: "quantize",
        title: "quantize and dequantize against memcpy of the source",
        has: |r| r.what.contains("quantize"),
    },
    Figure {
        file: "quantized-attend",
        title: "attend, decode, over quantised caches",
        has: |r| r.limit.starts_with("the same in"),
    },
    Figure { file: "attend", title: "attend", has: |r| r.what.starts_with("attend") },
    Figure { file: "ttft", title: "Time to first token", has: |r| r.what.starts_with("TTFT") },
    Figure { file: "block-pool", title: "Block pool", has: |r| r.what.starts_with("block pool") },
    Figure { file: "keys", title: "Keys and reuse of chunks", has: |_| true },
];

/// Writes `FAMILY.svg` into `folder` for each family with a sweep. Returns the file names.
pub(super) fn write(folder: &Path, sweeps: &[Sweep]) -> Result<Vec<String>> {
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut written = Vec::new();
    for (i, family) in FAMILIES.iter().enumerate() {
        let of = |row: &BenchRow| FAMILIES.iter().position(|family| (family.has)(row)) == Some(i);
        let shown: Vec<&Sweep> = sweeps.iter().filter(|s| s.rows.len() > 1 && of(&s.rows[0])).collect();
        if shown.is_empty() {
            continue;
        }
        let name = format!("{}.svg", family.file);
        draw(&folder.join(&name), family.title, &shown).map_err(|e| format!("{name}: {e}"))?;
        written.push(name);
    }
    Ok(written)
}

/// The chart's width. The legend is to its right.
const CHART: u32 = 640;
/// The height of a line in the legend.
const LINE: i32 = 20;

/// Returns the label at `2^x` on a size axis. Only powers of two have one.
fn size_label(x: f64, bytes: bool) -> String {
    let whole = x.round();
    match whole {
        _ if (x - whole).abs() > 1e-6 => String::new(),
        w if bytes && w >= 20.0 => format!("{} Mi", (w - 20.0).exp2()),
        w if bytes && w >= 10.0 => format!("{} Ki", (w - 10.0).exp2()),
        w => w.exp2().to_string(),
    }
}

/// Returns the label at `2^y` on a ratio axis.
fn ratio_label(y: f64) -> String {
    let ratio = y.exp2();
    match ratio {
        r if r >= 10.0 => format!("{r:.0}"),
        r if r >= 2.0 => format!("{r:.1}"),
        r if r >= 0.1 => format!("{r:.2}"),
        r if r >= 0.01 => format!("{r:.3}"),
        r => format!("{r:.1e}"),
    }
}

/// Returns the range of ratios to show, as powers of two. It includes 1 and all ratios, with a margin.
fn shown_ratios(ratios: impl Iterator<Item = f64>) -> (f64, f64) {
    let logs = ratios.filter(|ratio| *ratio > 0.0).map(f64::log2);
    let (low, high) = logs.fold((0.0f64, 0.0f64), |(low, high), at| (low.min(at), high.max(at)));
    let margin = 0.05 * (high - low).max(0.5);
    (low - margin, high + margin)
}

/// Returns the colour of line `i` of `n`. All lines in a chart have different colours.
fn colour(i: usize, n: usize) -> RGBColor {
    // Neighbours in the legend also differ in lightness.
    let lightness = if i.is_multiple_of(2) { 0.36 } else { 0.56 };
    let (r, g, b) = HSLColor(i as f64 / n.max(1) as f64, 0.75, lightness).rgb();
    RGBColor(r, g, b)
}

fn draw(path: &Path, title: &str, sweeps: &[&Sweep]) -> std::result::Result<(), Box<dyn Error>> {
    let rows = || sweeps.iter().flat_map(|sweep| &sweep.rows);
    // Sizes double from one tick to the next.
    let low = rows().map(|row| row.size.log2()).fold(f64::INFINITY, f64::min).floor();
    let high = rows().map(|row| row.size.log2()).fold(0.0, f64::max).ceil();
    let (bottom, top) = shown_ratios(rows().map(|row| row.ratio));
    let height = 480.max(60 + LINE as u32 * sweeps.len() as u32);
    let root = SVGBackend::new(path, (CHART + 480, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let (left, right) = root.split_horizontally(CHART);
    let mut chart = ChartBuilder::on(&left)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(60)
        .build_cartesian_2d(low..high, bottom..top)?;
    let bytes = rows().all(|row| row.unit == "bytes");
    let unit = match sweeps.first().map_or("", |sweep| sweep.rows[0].unit.as_str()) {
        "bytes" => "size of one call, in bytes".to_owned(),
        "tokens" => "length of the prompt, in tokens".to_owned(),
        other => format!("size, in {other}"),
    };
    chart
        .configure_mesh()
        .x_desc(unit)
        .x_labels((high - low) as usize + 1)
        .y_desc("speed relative to the limit or peer (1: equally fast)")
        .x_label_formatter(&|x| size_label(*x, bytes))
        .y_label_formatter(&|y| ratio_label(*y))
        .light_line_style(WHITE)
        .draw()?;
    chart.draw_series(LineSeries::new([(low, 0.0), (high, 0.0)], BLACK.mix(0.6)))?;
    for (i, sweep) in sweeps.iter().enumerate() {
        let colour = colour(i, sweeps.len());
        let points = || sweep.rows.iter().map(|row| (row.size.log2(), row.ratio.log2()));
        chart.draw_series(LineSeries::new(points(), colour.stroke_width(2)))?;
        chart.draw_series(points().map(|point| Circle::new(point, 3, colour.filled())))?;
        let y = 48 + LINE * i as i32;
        right.draw(&PathElement::new([(0, y), (18, y)], colour.stroke_width(2)))?;
        let name = format!("{} / {}", sweep.name, sweep.rows[0].limit);
        right.draw(&Text::new(name, (24, y - 6), ("sans-serif", 12)))?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbench::rows::sweeps;

    #[test]
    fn labels_are_sizes_and_ratios() {
        let sizes = [size_label(21.0, true), size_label(19.0, true), size_label(10.0, false)];
        assert_eq!(sizes, ["2 Mi", "512 Ki", "1024"]);
        assert_eq!(size_label(20.5, true), "");
        assert_eq!([ratio_label(4.0), ratio_label(0.0), ratio_label(-1.0)], ["16", "1.00", "0.50"]);
    }

    #[test]
    fn the_chart_ends_where_the_ratios_and_1_do() {
        let (low, high) = shown_ratios([4.0, 8.0].into_iter());
        assert!((-0.3..0.0).contains(&low) && (3.0..3.3).contains(&high), "{low} {high}");
    }

    #[test]
    fn no_two_lines_have_one_colour() {
        let mut colours: Vec<_> = (0..32).map(|i| colour(i, 32)).map(|c| (c.0, c.1, c.2)).collect();
        colours.sort_unstable();
        colours.dedup();
        assert_eq!(colours.len(), 32);
    }

    #[test]
    fn sweeps_are_drawn_by_family_and_single_rows_are_not() {
        let folder = std::env::temp_dir().join(format!("kvbench-plot-{}", std::process::id()));
        let named = |what: &str, size| BenchRow {
            what: what.to_owned(),
            sweep: None,
            size,
            unit: "bytes".to_owned(),
            seconds: 1.0,
            limit: "memcpy".to_owned(),
            limit_seconds: 1.0,
            ratio: 1.0,
            double: false,
        };
        let all =
            [("scatter bf16", 1.0), ("scatter bf16", 2.0), ("gather", 1.0), ("gather", 4.0), ("rope", 1.0)];
        let written = write(&folder, &sweeps(all.map(|(what, size)| named(what, size)).to_vec()));
        assert_eq!(written, Ok(vec!["moves.svg".to_owned()]));
        let text = std::fs::read_to_string(folder.join("moves.svg")).unwrap_or_default();
        assert!(text.contains("scatter bf16 / memcpy") && text.contains("gather / memcpy"));
        let _ = std::fs::remove_dir_all(folder);
    }
}
