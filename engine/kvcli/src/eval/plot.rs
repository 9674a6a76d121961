//! The plot of `kvc eval`: the quality of each strategy against its cost, relative to full attention.

use kvchunk::{ComputeMode, PositionStrategy, Recompute, RecomputeStrategy};
use kvengine::ResultFile;
use kvlab::Score;

use super::kinds;
use super::show::DRAWS;
use crate::error::Result;
use crate::plot::{Frame, Legend, Series, draw};

/// The modes that have their own panel.
const MODES: [(ComputeMode, &str); 2] = [
    (ComputeMode::WithSystem, "documents computed with the system prompt"),
    (ComputeMode::Alone, "documents computed alone"),
];

/// Plots right answers (or divergence from full attention if answers were not measured) against the prefill's
/// operation count, with one line per family of strategies. Only the last kind of question is plotted,
/// because its answers depend most on other documents.
pub(super) fn plot(
    file: ResultFile,
    scores: &[Score],
    draws: usize,
    positions: PositionStrategy,
) -> Result<()> {
    let kinds = kinds(scores);
    let Some(kind) = kinds.last().copied() else { return Ok(()) };
    let of_kind: Vec<&Score> = scores.iter().filter(|score| score.kind == kind).collect();
    let full = of_kind.iter().find(|score| score.arm.cell.is_none()).map_or(f64::NAN, |score| score.flops);
    let answered = of_kind.iter().any(|score| score.accuracy.is_some());
    let point = |score: &Score| {
        let measured = if answered { score.accuracy } else { score.divergence };
        let unit = if answered { 100.0 } else { 1.0 };
        let (mean, half) = measured.map_or((f64::NAN, None), |x| (x.mean, x.half_width));
        (100.0 * score.flops / full, unit * mean, unit * half.filter(|_| draws >= DRAWS).unwrap_or(0.0))
    };
    let mut panels = Vec::new();
    for (mode, title) in MODES {
        let of_mode = |score: &&&Score| {
            let of_cell = |cell: kvchunk::ReuseCell| cell.mode == mode && cell.strategy == positions;
            score.arm.scaling.is_plain() && score.arm.cell.is_some_and(of_cell)
        };
        let mine: Vec<&Score> = of_kind.iter().filter(of_mode).copied().collect();
        let series = series(&mine, point);
        if !series.is_empty() {
            panels.push((title, series));
        }
    }
    let points = || panels.iter().flat_map(|(_, series)| series).flat_map(|series| &series.points);
    let highest = points().map(|point| point.1 + point.2).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let widest = points().map(|point| point.0).fold(100.0, f64::max);
    let of = if kinds.len() > 1 { format!(", {}", kind.name()) } else { String::new() };
    let (y, top) = if answered {
        (format!("right answers{of}, %"), 102.0)
    } else {
        (format!("divergence from full attention{of}, nats per token"), 1.05 * highest)
    };
    let frame = |title| {
        let (x, x_range, y_range) =
            ("operations of the prefill, % of full attention's", 0.0..widest, 0.0..top);
        Frame {
            title,
            x,
            y: &y,
            x_range,
            y_range,
            legend: if answered { Legend::Below } else { Legend::Above },
        }
    };
    let panels: Vec<_> = panels.into_iter().map(|(title, series)| (frame(title), series)).collect();
    draw(file, &panels)
}

/// Returns one line per family, through the points without recomputation and the points of the family's
/// strategies. Families with a single strategy are left out if another family has more. If there are no
/// families, returns all points as one line.
fn series(scores: &[&Score], point: impl Fn(&Score) -> (f64, f64, f64)) -> Vec<Series> {
    let mut families: Vec<String> = Vec::new();
    for score in scores {
        if let Some(family) = family(&score.arm.recompute).filter(|family| !families.contains(family)) {
            families.push(family);
        }
    }
    let plain = scores.iter().filter(|score| score.arm.recompute == Recompute::None);
    let line = |name: String| {
        let members = scores.iter().filter(|score| family(&score.arm.recompute).as_ref() == Some(&name));
        let mut points: Vec<_> = plain.clone().chain(members).map(|score| point(score)).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name, points }
    };
    if families.is_empty() && !scores.is_empty() {
        let points = scores.iter().map(|score| point(score)).collect();
        return vec![Series { name: "nothing recomputed".to_owned(), points }];
    }
    let mut lines: Vec<Series> = families.into_iter().map(line).collect();
    // Families with a single member are only in the table, because in the plot they would hide the lines.
    let longest = lines.iter().map(|line| line.points.len()).max().unwrap_or(0);
    let single = plain.count() + 1;
    lines.retain(|line| longest <= single || line.points.len() > single);
    lines
}

/// Returns a strategy's family: its name without the number or fraction of tokens to choose, and without a
/// seed. A strategy without such a number has no family.
fn family(recompute: &Recompute) -> Option<String> {
    let name = recompute.name();
    let (family, choice) = name.split_once(':')?;
    let rest = choice.find(['@', ':']).map_or("", |at| &choice[at..]);
    let seeded = matches!(recompute, Recompute::Random { .. });
    Some(format!("{family}{}", if seeded { "" } else { rest.trim_end_matches(":values") }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_a_family_differ_in_their_number_alone() {
        let of = |text: &str| family(&text.parse().unwrap());
        assert_eq!([of("none"), of("full")], [None, None]);
        let names = [
            "link:4",
            "blend:0.2@10",
            "blend:0.5@10:keys",
            "question:0.2",
            "question:0.2@20",
            "joint:0.2",
            "random:0.3@7",
        ];
        let families = ["link", "blend@10", "blend@10:keys", "question", "question@20", "joint@1", "random"];
        assert_eq!(names.map(of), families.map(|family| Some(family.to_owned())));
    }
}
