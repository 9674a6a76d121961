//! The finals: full attention, the reuse cells and a few strategies answer hundreds of local questions.
//!
//! The answers to each draw are kept in a file, so an interrupted run can be continued. The grades are
//! written to `proof/kvlab/tests/published`, from where a run on another machine continues. A test checks the
//! gate's verdicts on them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::{
    AnswerLine, EvalCall, FLOPS, FULL, KEPT, QUALITY, ask, plain, program, read, with_shares, write_table,
};
use xtask::published::folder;
use xtask::run::{Result, create_folder, read as read_text, root, write as write_text};

/// The command in the table's marker line.
const TABLE: &str = "cargo xtask published --answers";

/// The number of questions per draw.
const QUESTIONS: usize = 20;

/// The first draw of timed questions. They differ from the graded questions.
const TIMED: usize = 1000;

/// The questions of the final for one number of documents.
struct Final {
    documents: usize,
    draws: usize,
    ways: &'static [&'static str],
}

/// The strategies that are compared with full attention: first the cells, then the finalists from the screen.
const WAYS: &[&str] = &[
    "overlapped, with-system, none",
    "overlapped, alone, none",
    "sequential, alone, none",
    "sequential, with-system, none",
    "sequential, with-system, link:16",
    "sequential, with-system, question:0.2",
    "sequential, with-system, question:0.3",
    "sequential, with-system, question:0.5",
    "sequential, alone, link:16",
    "sequential, alone, link:32",
];

/// With eight documents, full attention itself answers too few questions correctly to judge by. A few
/// questions are enough to show that.
const FINALS: [Final; 3] = [
    Final { documents: 2, draws: 20, ways: WAYS },
    Final { documents: 4, draws: 20, ways: WAYS },
    Final { documents: 8, draws: 2, ways: &["sequential, with-system, question:0.5"] },
];

/// The grades of the answers about one number of documents.
#[derive(Serialize, Deserialize)]
struct KeptFinal {
    documents: usize,
    questions: usize,
    /// Full attention comes first.
    ways: Vec<WayResult>,
}

/// The answers given with one strategy.
#[derive(Serialize, Deserialize)]
struct WayResult {
    name: String,
    /// One digit per answer, 1 if it is right and 0 if not, ordered by draw and question.
    right: String,
    /// The share of document tokens that were recomputed.
    #[serde(rename = "anew")]
    recomputed: f64,
    /// The operation count of the prefill, relative to full attention's.
    operations: f64,
    /// The median time to first token in milliseconds, for questions asked one after another on an idle
    /// machine.
    ttft_ms: Option<f64>,
}

/// Asks all questions that have no answers so far, and measures times.
pub(super) fn run() -> Result {
    restore()?;
    for Final { documents, draws, ways } in FINALS {
        for draw in 0..draws {
            println!("{documents} documents, draw {} of {draws}", draw + 1);
            complete(documents, draw, ways)?;
        }
        if read_kept(documents)?.is_some_and(|kept| kept.times(ways)) {
            continue;
        }
        let asked = EvalCall { documents, first: TIMED, draws: 1, questions: QUESTIONS, local: true };
        ask(ways, asked, "answers", &times(documents))?;
    }
    keep()
}

/// Asks a draw's questions with the strategies that have not answered them.
fn complete(documents: usize, draw: usize, ways: &[&str]) -> Result {
    let file = answers(documents, draw);
    let old = std::fs::read_to_string(&file).unwrap_or_default();
    let known: Vec<String> = if old.is_empty() { Vec::new() } else { names(&read(&file)?) };
    let missing: Vec<&str> =
        ways.iter().copied().filter(|way| !known.iter().any(|known| known == way)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let asked = EvalCall { documents, first: draw, draws: 1, questions: QUESTIONS, local: true };
    let more = file.with_extension("more");
    ask(&missing, asked, "answers", &more)?;
    write_text(&file, &(old + &read_text(&more)?))?;
    std::fs::remove_file(&more).map_err(|e| format!("{}: {e}", more.display()))
}

/// Restores the draws' answers from the kept grades, with each strategy's average cost.
fn restore() -> Result {
    create_folder(&folder().join("finals"))?;
    for Final { documents, draws, .. } in FINALS {
        let Some(kept) = read_kept(documents)? else { continue };
        for draw in (0..draws).filter(|draw| (draw + 1) * QUESTIONS <= kept.questions) {
            let file = answers(documents, draw);
            if !file.exists() {
                write_text(&file, &kept.draw(draw))?;
            }
        }
    }
    Ok(())
}

/// Returns the file of a draw's answers.
fn answers(documents: usize, draw: usize) -> PathBuf {
    folder().join(format!("finals/answers-{documents}-{draw}.jsonl"))
}

/// Returns the file of the timed answers.
fn times(documents: usize) -> PathBuf {
    folder().join(format!("finals/times-{documents}.jsonl"))
}

/// Returns the names of the strategies, in order of first occurrence.
fn names(answers: &[AnswerLine]) -> Vec<String> {
    let mut names = Vec::new();
    for answer in answers {
        let name = plain(&answer.name);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Returns the path of the grades kept for a number of documents.
fn kept(documents: usize) -> PathBuf {
    root().join(KEPT).join(format!("{documents}.json"))
}

/// Reads the grades kept for a number of documents.
fn read_kept(documents: usize) -> Result<Option<KeptFinal>> {
    let path = kept(documents);
    if !path.exists() {
        return Ok(None);
    }
    let text = read_text(&path)?;
    serde_json::from_str(&text).map(Some).map_err(|e| format!("{}: {e}", path.display()))
}

impl KeptFinal {
    /// Returns the table cells in a strategy's row that come before and after the points it loses.
    fn cells(&self, way: &WayResult) -> [String; 2] {
        let time = match (way.ttft_ms, self.time(FULL)) {
            (Some(ms), Some(full)) => format!("{ms:.0} ms, {:.0} %", 100.0 * ms / full),
            _ => "–".to_owned(),
        };
        let (right, asked) = (way.right.matches('1').count(), self.questions);
        [
            format!("| {} | {} | {right} of {asked} | ", self.documents, way.name),
            format!(" | {:.0} % | {:.0} % | {time} |", 100.0 * way.recomputed, 100.0 * way.operations),
        ]
    }

    /// Returns a draw's answers as a string of digits.
    fn draw(&self, draw: usize) -> String {
        let mut text = String::new();
        for WayResult { name, right, recomputed, operations, .. } in &self.ways {
            for (question, right) in right.bytes().skip(draw * QUESTIONS).take(QUESTIONS).enumerate() {
                text += &AnswerLine {
                    name: name.clone(),
                    draw,
                    question,
                    right: Some(right == b'1'),
                    divergence: None,
                    agreement: None,
                    recomputed: *recomputed,
                    flops: operations * FLOPS,
                    ttft_ms: 0.0,
                }
                .line();
            }
        }
        text
    }

    /// Returns the median time to first token of a strategy.
    fn time(&self, way: &str) -> Option<f64> {
        self.ways.iter().find(|known| known.name == way)?.ttft_ms
    }

    /// Returns true if the times of all strategies are known.
    fn times(&self, ways: &[&str]) -> bool {
        ways.iter().chain([&FULL]).all(|way| self.time(way).is_some())
    }
}

/// Writes the grades for all draws that every strategy has answered.
fn keep() -> Result {
    for Final { documents, draws, ways } in FINALS {
        // Kept draws are numbered in order, so draws after a gap are not kept.
        let mut draw_answers = Vec::new();
        for draw in (0..draws).take_while(|&draw| answers(documents, draw).exists()) {
            let answers = read(&answers(documents, draw))?;
            let known = names(&answers);
            if !ways.iter().all(|way| known.iter().any(|known| known == way)) {
                break;
            }
            draw_answers.push(answers);
        }
        if draw_answers.is_empty() {
            continue;
        }
        let timed = times(documents);
        let timed = if timed.exists() { read(&timed)? } else { Vec::new() };
        let all = || std::iter::once(FULL).chain(ways.iter().copied());
        let mut ways: Vec<WayResult> = all().map(|way| of_way(way, &draw_answers, &timed)).collect();
        // All times must come from one machine, so kept times stay unless all times are new.
        if let Some(before) = read_kept(documents)?
            && ways.iter().any(|way| way.ttft_ms.is_none())
        {
            for way in &mut ways {
                way.ttft_ms = before.time(&way.name);
            }
        }
        let questions = ways.first().map_or(0, |way| way.right.len());
        let text = serde_json::to_string_pretty(&KeptFinal { documents, questions, ways })
            .map_err(|e| e.to_string())?;
        let path = kept(documents);
        create_folder(&root().join(KEPT))?;
        write_text(&path, &(text + "\n"))?;
    }
    Ok(())
}

/// Collects a strategy's answers, question by question. If there are several answers to a question, only the
/// first one is used.
fn of_way(way: &str, draws: &[Vec<AnswerLine>], timed: &[AnswerLine]) -> WayResult {
    let mut of_questions: BTreeMap<(usize, usize), (bool, f64, f64)> = BTreeMap::new();
    for (answer, share) in draws.iter().flat_map(|answers| with_shares(answers)) {
        if plain(&answer.name) == way {
            let right = answer.right.unwrap_or(false);
            let question = (answer.draw, answer.question);
            of_questions.entry(question).or_insert((right, answer.recomputed, share));
        }
    }
    let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / of_questions.len().max(1) as f64;
    let recomputed = mean(&mut of_questions.values().map(|(_, share, _)| *share));
    let operations = mean(&mut of_questions.values().map(|(_, _, share)| *share));
    let mut times: Vec<f64> =
        timed.iter().filter(|answer| plain(&answer.name) == way).map(|answer| answer.ttft_ms).collect();
    times.sort_by(f64::total_cmp);
    WayResult {
        name: way.to_owned(),
        right: of_questions.values().map(|(right, ..)| if *right { '1' } else { '0' }).collect(),
        recomputed: rounded(recomputed),
        operations: rounded(operations),
        ttft_ms: times.get(times.len() / 2).map(|ms| (ms * 10.0).round() / 10.0),
    }
}

fn rounded(share: f64) -> f64 {
    (share * 1e4).round() / 1e4
}

/// The output of `kvc eval --read --json`.
#[derive(Deserialize)]
struct Scores {
    scores: Vec<WayScore>,
}

#[derive(Deserialize)]
struct WayScore {
    name: String,
    paired: Option<LossBounds>,
}

#[derive(Clone, Copy, Deserialize)]
struct LossBounds {
    loss: f64,
    at_least: f64,
    at_most: f64,
}

/// Returns each strategy's loss with its bounds, computed from the answers.
fn bounds(documents: usize, draws: usize) -> Result<BTreeMap<String, LossBounds>> {
    let mut command = Command::new(program());
    command.args(["eval", "--json"]);
    for draw in (0..draws).filter(|&draw| answers(documents, draw).exists()) {
        command.arg("--read").arg(answers(documents, draw));
    }
    let output = command.output().map_err(|e| format!("`kvc eval` cannot be run: {e}"))?;
    if !output.status.success() {
        return Err(format!("`kvc eval` says {}", String::from_utf8_lossy(&output.stderr)));
    }
    let scores: Scores =
        serde_json::from_slice(&output.stdout).map_err(|e| format!("`kvc eval` printed {e}"))?;
    let of = |score: WayScore| Some((plain(&score.name), score.paired?));
    Ok(scores.scores.into_iter().filter_map(of).collect())
}

/// Writes the table in docs/quality.md.
pub(super) fn write() -> Result {
    restore()?;
    keep()?;
    let mut table = String::from(
        "| documents | positions, mode, recomputed | right | points lost | tokens recomputed | operations | time to first token |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for Final { documents, draws, .. } in FINALS {
        let Some(kept) = read_kept(documents)? else { continue };
        let bounds = bounds(documents, draws)?;
        for way in &kept.ways {
            let lost = match bounds.get(&way.name).filter(|_| way.name != FULL) {
                Some(LossBounds { loss, at_least, at_most }) => {
                    let [loss, least, most] = [loss, at_least, at_most].map(|share| 100.0 * share);
                    format!("{loss:.1} ({least:.1} to {most:.1})")
                }
                None => "–".to_owned(),
            };
            let [right, costs] = kept.cells(way);
            let _ = writeln!(table, "{right}{lost}{costs}");
        }
    }
    write_table(QUALITY, TABLE, &table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(name: &str, question: usize, right: bool, flops: f64) -> AnswerLine {
        AnswerLine {
            name: name.to_owned(),
            draw: 3,
            question,
            right: Some(right),
            divergence: None,
            agreement: None,
            recomputed: 0.25,
            flops,
            ttft_ms: flops,
        }
    }

    #[test]
    fn kept_answers_are_in_the_order_of_questions_and_count_once() {
        let way = "sequential, alone, blend:0.2@10:values";
        let draws = [vec![
            answer(FULL, 0, true, 100.0),
            answer(FULL, 1, true, 200.0),
            answer(way, 1, false, 100.0),
            // A second call asks full attention again, which has different costs there.
            answer(FULL, 0, false, 1000.0),
            answer(way, 0, true, 100.0),
        ]];
        let kept = of_way("sequential, alone, blend:0.2@10", &draws, &draws[0]);
        assert_eq!((kept.right.as_str(), kept.recomputed, kept.ttft_ms), ("10", 0.25, Some(100.0)));
        assert!((kept.operations - 0.3).abs() < 1e-9, "{}", kept.operations);
        assert_eq!(of_way(FULL, &draws, &[]).right, "11");
        assert_eq!(names(&draws[0]), [FULL, "sequential, alone, blend:0.2@10"]);
    }

    #[test]
    fn restored_answers_are_kept_again_as_they_were() {
        let way = |name: &str, draws: [&str; 2], recomputed, operations| WayResult {
            name: name.to_owned(),
            right: draws.concat(),
            recomputed,
            operations,
            ttft_ms: None,
        };
        let (first, second) = ("10".repeat(QUESTIONS / 2), "0".repeat(QUESTIONS));
        let ways = vec![
            way(FULL, [&second, &first], 1.0, 1.0),
            way("sequential, alone, none", [&first, &second], 0.0, 0.0372),
        ];
        let kept = KeptFinal { documents: 4, questions: 2 * QUESTIONS, ways };
        let read = |draw| kept.draw(draw).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let draws: Vec<Vec<AnswerLine>> = (0..2).map(read).collect();
        for way in &kept.ways {
            let again = of_way(&way.name, &draws, &[]);
            assert_eq!((&again.right, again.recomputed), (&way.right, way.recomputed));
            assert!((again.operations - way.operations).abs() < 1e-6, "{}", again.operations);
        }
    }

    /// Formats the ranges of the number of right answers and of the time over some strategies, as `least
    /// to most`.
    fn shown(kept: &KeptFinal, strategies: impl Fn(&str) -> bool) -> [String; 2] {
        let ways = || kept.ways.iter().filter(|way| strategies(&way.name));
        let range = |values: Vec<f64>| {
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            let most = values.iter().copied().fold(0.0, f64::max);
            let [least, most] = [least, most].map(|value| format!("{value:.0}"));
            if least == most { least } else { format!("{least} to {most}") }
        };
        let right = ways().map(|way| way.right.matches('1').count() as f64).collect();
        let ms = ways().map(|way| way.ttft_ms.unwrap_or_default()).collect();
        [range(right), format!("{} ms", range(ms))]
    }

    #[test]
    fn the_readme_shows_the_kept_finals() {
        let readme = include_str!("../../../../README.md").replace(['*', ','], "");
        let [two, four] = [2, 4].map(|documents| read_kept(documents).unwrap().expect("a kept file"));
        let default = |name: &str| name == "sequential, with-system, question:0.5";
        let none = |name: &str| name.ends_with(", none");
        let of =
            |strategies: &dyn Fn(&str) -> bool| [shown(&two, strategies), shown(&four, strategies)].concat();
        for (row, cells) in [
            ("full attention", of(&|name| name == FULL)),
            ("kvcache default", of(&default)),
            ("kvcache nothing recomputed", of(&none)),
        ] {
            let row = format!("| {row} | {} |", cells.join(" | "));
            assert!(readme.contains(&row), "the README has no row {row}");
        }
    }

    #[test]
    fn kept_finals_are_whole() {
        for Final { documents, draws, ways } in FINALS {
            let kept = read_kept(documents).unwrap().expect("a kept file");
            let names: Vec<&str> = kept.ways.iter().map(|way| &*way.name).collect();
            assert_eq!(names, [&[FULL], ways].concat());
            assert_eq!(kept.questions, draws * QUESTIONS, "{documents} documents");
            assert!(kept.ways.iter().all(|way| way.right.len() == kept.questions), "{documents} documents");
        }
    }

    #[test]
    fn the_page_shows_the_kept_finals() {
        let page = include_str!("../../../../docs/quality.md");
        let mut rows = xtask::page::table(page, TABLE).unwrap().lines().skip(2);
        for Final { documents, .. } in FINALS {
            let kept = read_kept(documents).unwrap().expect("a kept file");
            for way in &kept.ways {
                let [right, costs] = kept.cells(way);
                let row = rows.next().unwrap_or_default();
                let same = row.starts_with(&right) && row.ends_with(&costs);
                assert!(same, "{row}\n{right}…{costs}: `cargo xtask published --table` writes it");
            }
        }
        assert_eq!(rows.next(), None);
    }
}
