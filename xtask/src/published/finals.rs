//! The finals: the cells and a few strategies answer hundreds of local questions beside full attention.
//!
//! Answers are kept in a file a draw, so that a run goes on where another one was stopped. What was right is written to
//! `proof/kvlab/tests/published`, by which a test holds the gate to its verdicts. A run on another machine goes on from there.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::{
    Answer, Asked, FLOPS, FULL, KEPT, QUALITY, ask, folder, plain, program, read, with_shares, write_table,
};
use crate::run::{Result, root};

/// The name under which the page has the table.
const TABLE: &str = "cargo xtask published --answers";

/// Questions in a draw.
const QUESTIONS: usize = 20;

/// The first draw of the questions by which times are measured: others than those that are judged.
const TIMED: usize = 1000;

/// What is asked about so many documents.
struct Final {
    documents: usize,
    draws: usize,
    ways: &'static [&'static str],
}

/// The ways to answer beside full attention: the cells, and then the finalists of the screen.
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

/// The ways and the numbers of documents that the README shows.
const SHORT: &[&str] = &[
    FULL,
    DEFAULT,
    "sequential, alone, link:32",
    "sequential, alone, link:16",
    "sequential, alone, none",
    "overlapped, with-system, none",
];
const SHORT_DOCUMENTS: [usize; 2] = [2, 4];

/// The way that `kvc` takes by default.
const DEFAULT: &str = "sequential, with-system, question:0.5";

/// With eight documents full attention itself answers too little to judge anything by: a few questions show it.
const FINALS: [Final; 3] = [
    Final { documents: 2, draws: 20, ways: WAYS },
    Final { documents: 4, draws: 20, ways: WAYS },
    Final { documents: 8, draws: 2, ways: &["sequential, with-system, question:0.5"] },
];

/// What was right of the answers about so many documents.
#[derive(Serialize, Deserialize)]
struct Kept {
    documents: usize,
    questions: usize,
    /// Full attention first.
    ways: Vec<Way>,
}

/// The answers given in one way: a 1 for each that is right and a 0 for each that is not, in the order of draws and questions.
#[derive(Serialize, Deserialize)]
struct Way {
    name: String,
    right: String,
    /// The share of document tokens computed anew.
    anew: f64,
    /// Operations of the prefill, as a share of full attention's.
    operations: f64,
    /// The median time to first token in milliseconds, of questions asked one after another on an idle machine.
    ttft_ms: Option<f64>,
}

/// Asks what has not been answered yet, and measures times.
pub(super) fn run() -> Result {
    unpack()?;
    for Final { documents, draws, ways } in FINALS {
        for draw in 0..draws {
            println!("{documents} documents, draw {} of {draws}", draw + 1);
            complete(documents, draw, ways)?;
        }
        if read_kept(documents)?.is_some_and(|kept| kept.times(ways)) {
            continue;
        }
        let asked = Asked { documents, first: TIMED, draws: 1, questions: QUESTIONS, local: true };
        ask(ways, asked, "answers", &times(documents))?;
    }
    keep()
}

/// Asks a draw in the ways in which it was not asked before.
fn complete(documents: usize, draw: usize, ways: &[&str]) -> Result {
    let file = answers(documents, draw);
    let old = std::fs::read_to_string(&file).unwrap_or_default();
    let known: Vec<String> = if old.is_empty() { Vec::new() } else { names(&read(&file)?) };
    let missing: Vec<&str> =
        ways.iter().copied().filter(|way| !known.iter().any(|known| known == way)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let asked = Asked { documents, first: draw, draws: 1, questions: QUESTIONS, local: true };
    let more = file.with_extension("more");
    ask(&missing, asked, "answers", &more)?;
    let new = std::fs::read_to_string(&more).map_err(|e| format!("{}: {e}", more.display()))?;
    std::fs::write(&file, old + &new).map_err(|e| format!("{}: {e}", file.display()))?;
    std::fs::remove_file(&more).map_err(|e| format!("{}: {e}", more.display()))
}

/// Writes the answers to draws that were asked elsewhere, as far as they are kept: whether each was right, and the cost of each way
/// on average.
fn unpack() -> Result {
    std::fs::create_dir_all(folder().join("finals")).map_err(|e| e.to_string())?;
    for Final { documents, draws, .. } in FINALS {
        let Some(kept) = read_kept(documents)? else { continue };
        for draw in (0..draws).filter(|draw| (draw + 1) * QUESTIONS <= kept.questions) {
            let file = answers(documents, draw);
            if !file.exists() {
                std::fs::write(&file, kept.draw(draw)).map_err(|e| format!("{}: {e}", file.display()))?;
            }
        }
    }
    Ok(())
}

/// Returns the file of the answers to a draw.
fn answers(documents: usize, draw: usize) -> PathBuf {
    folder().join(format!("finals/answers-{documents}-{draw}.jsonl"))
}

/// Returns the file of the answers by which times are measured.
fn times(documents: usize) -> PathBuf {
    folder().join(format!("finals/times-{documents}.jsonl"))
}

/// Returns the names of ways, in the order in which they first occur.
fn names(answers: &[Answer]) -> Vec<String> {
    let mut names = Vec::new();
    for answer in answers {
        let name = plain(&answer.name);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Returns the path of what is kept about so many documents.
fn kept(documents: usize) -> PathBuf {
    root().join(KEPT).join(format!("{documents}.json"))
}

/// Returns what is kept about so many documents.
fn read_kept(documents: usize) -> Result<Option<Kept>> {
    let path = kept(documents);
    if !path.exists() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_str(&text).map(Some).map_err(|e| format!("{}: {e}", path.display()))
}

impl Kept {
    /// Returns the cells of a way's row before the points that it loses, and those behind them.
    fn cells(&self, way: &Way) -> [String; 2] {
        let time = match (way.ttft_ms, self.time(FULL)) {
            (Some(ms), Some(full)) => format!("{ms:.0} ms, {:.0} %", 100.0 * ms / full),
            _ => "–".to_owned(),
        };
        let (right, asked) = (way.right.matches('1').count(), self.questions);
        [
            format!("| {} | {} | {right} of {asked} | ", self.documents, way.name),
            format!(" | {:.0} % | {:.0} % | {time} |", 100.0 * way.anew, 100.0 * way.operations),
        ]
    }

    /// Returns the answers to a draw, a line each.
    fn draw(&self, draw: usize) -> String {
        let mut text = String::new();
        for Way { name, right, anew, operations, .. } in &self.ways {
            for (question, right) in right.bytes().skip(draw * QUESTIONS).take(QUESTIONS).enumerate() {
                text += &Answer {
                    name: name.clone(),
                    draw,
                    question,
                    right: Some(right == b'1'),
                    divergence: None,
                    agreement: None,
                    recomputed: *anew,
                    flops: operations * FLOPS,
                    ttft_ms: 0.0,
                }
                .line();
            }
        }
        text
    }

    /// Returns the median time to first token of a way.
    fn time(&self, way: &str) -> Option<f64> {
        self.ways.iter().find(|known| known.name == way)?.ttft_ms
    }

    /// Returns whether there are times of all ways.
    fn times(&self, ways: &[&str]) -> bool {
        ways.iter().chain([&FULL]).all(|way| self.time(way).is_some())
    }
}

/// Keeps what was right of the draws that were asked in all ways.
fn keep() -> Result {
    for Final { documents, draws, ways } in FINALS {
        // Draws are numbered by their order here: none after a gap counts.
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
        let mut ways: Vec<Way> = all().map(|way| of_way(way, &draw_answers, &timed)).collect();
        // Times of one machine only: those that were kept go when all are new.
        if let Some(before) = read_kept(documents)?
            && ways.iter().any(|way| way.ttft_ms.is_none())
        {
            for way in &mut ways {
                way.ttft_ms = before.time(&way.name);
            }
        }
        let questions = ways.first().map_or(0, |way| way.right.len());
        let text =
            serde_json::to_string_pretty(&Kept { documents, questions, ways }).map_err(|e| e.to_string())?;
        let path = kept(documents);
        std::fs::create_dir_all(root().join(KEPT)).map_err(|e| e.to_string())?;
        std::fs::write(&path, text + "\n").map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(())
}

/// Gathers the answers of a way, question by question. Of several answers to one question, the first counts.
fn of_way(way: &str, draws: &[Vec<Answer>], timed: &[Answer]) -> Way {
    let mut of_questions: BTreeMap<(usize, usize), (bool, f64, f64)> = BTreeMap::new();
    for (answer, share) in draws.iter().flat_map(|answers| with_shares(answers)) {
        if plain(&answer.name) == way {
            let right = answer.right.unwrap_or(false);
            let question = (answer.draw, answer.question);
            of_questions.entry(question).or_insert((right, answer.recomputed, share));
        }
    }
    let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / of_questions.len().max(1) as f64;
    let anew = mean(&mut of_questions.values().map(|(_, recomputed, _)| *recomputed));
    let operations = mean(&mut of_questions.values().map(|(_, _, share)| *share));
    let mut times: Vec<f64> =
        timed.iter().filter(|answer| plain(&answer.name) == way).map(|answer| answer.ttft_ms).collect();
    times.sort_by(f64::total_cmp);
    Way {
        name: way.to_owned(),
        right: of_questions.values().map(|(right, ..)| if *right { '1' } else { '0' }).collect(),
        anew: rounded(anew),
        operations: rounded(operations),
        ttft_ms: times.get(times.len() / 2).map(|ms| (ms * 10.0).round() / 10.0),
    }
}

fn rounded(share: f64) -> f64 {
    (share * 1e4).round() / 1e4
}

/// What `kvc eval --read --json` says of a way.
#[derive(Deserialize)]
struct Scores {
    scores: Vec<Score>,
}

#[derive(Deserialize)]
struct Score {
    name: String,
    paired: Option<Bounds>,
}

#[derive(Clone, Copy, Deserialize)]
struct Bounds {
    loss: f64,
    at_least: f64,
    at_most: f64,
}

/// Returns what the answers say of the loss of each way.
fn bounds(documents: usize, draws: usize) -> Result<BTreeMap<String, Bounds>> {
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
    let of = |score: Score| Some((plain(&score.name), score.paired?));
    Ok(scores.scores.into_iter().filter_map(of).collect())
}

/// Returns the table of the README: few ways, and of what they cost the time alone.
fn short() -> Result<String> {
    let mut all = Vec::new();
    for Final { documents, .. } in FINALS.iter().filter(|of| SHORT_DOCUMENTS.contains(&of.documents)) {
        all.extend(read_kept(*documents)?);
    }
    let mut table = String::from("| positions, mode, recomputed |");
    for Kept { documents, questions, .. } in &all {
        let _ = write!(table, " {documents} notes: right, of {questions} | time to first token |");
    }
    let _ = writeln!(table, "\n|---|{}", "---|---|".repeat(all.len()));
    for way in SHORT {
        let _ = write!(table, "| {way}{} |", if *way == DEFAULT { " (the default)" } else { "" });
        for kept in &all {
            let right =
                kept.ways.iter().find(|kept| kept.name == *way).map(|kept| kept.right.matches('1').count());
            let right = right.map_or_else(|| "–".to_owned(), |right| right.to_string());
            let time = kept.time(way).map_or_else(|| "–".to_owned(), |ms| format!("{ms:.0} ms"));
            let _ = write!(table, " {right} | {time} |");
        }
        table.push('\n');
    }
    Ok(table)
}

/// Writes the tables of docs/quality.md and of the README.
pub(super) fn write() -> Result {
    unpack()?;
    keep()?;
    let mut table = String::from(
        "| documents | positions, mode, recomputed | right | points lost | tokens anew | operations | time to first token |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for Final { documents, draws, .. } in FINALS {
        let Some(kept) = read_kept(documents)? else { continue };
        let bounds = bounds(documents, draws)?;
        for way in &kept.ways {
            let lost = match bounds.get(&way.name).filter(|_| way.name != FULL) {
                Some(Bounds { loss, at_least, at_most }) => {
                    let [loss, least, most] = [loss, at_least, at_most].map(|share| 100.0 * share);
                    format!("{loss:.1} ({least:.1} to {most:.1})")
                }
                None => "–".to_owned(),
            };
            let [right, costs] = kept.cells(way);
            let _ = writeln!(table, "{right}{lost}{costs}");
        }
    }
    write_table(QUALITY, TABLE, &table)?;
    write_table("README.md", TABLE, &short()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(name: &str, question: usize, right: bool, flops: f64) -> Answer {
        Answer {
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
    fn what_is_kept_of_a_way_is_in_the_order_of_questions_and_counts_once() {
        let way = "sequential, alone, blend:0.2@10:values";
        let draws = [vec![
            answer(FULL, 0, true, 100.0),
            answer(FULL, 1, true, 200.0),
            answer(way, 1, false, 100.0),
            // A second call asks full attention again, which costs its own units there.
            answer(FULL, 0, false, 1000.0),
            answer(way, 0, true, 100.0),
        ]];
        let kept = of_way("sequential, alone, blend:0.2@10", &draws, &draws[0]);
        assert_eq!((kept.right.as_str(), kept.anew, kept.ttft_ms), ("10", 0.25, Some(100.0)));
        assert!((kept.operations - 0.3).abs() < 1e-9, "{}", kept.operations);
        assert_eq!(of_way(FULL, &draws, &[]).right, "11");
        assert_eq!(names(&draws[0]), [FULL, "sequential, alone, blend:0.2@10"]);
    }

    #[test]
    fn answers_that_are_unpacked_are_kept_again_as_they_were() {
        let way = |name: &str, draws: [&str; 2], anew, operations| Way {
            name: name.to_owned(),
            right: draws.concat(),
            anew,
            operations,
            ttft_ms: None,
        };
        let (first, second) = ("10".repeat(QUESTIONS / 2), "0".repeat(QUESTIONS));
        let ways = vec![
            way(FULL, [&second, &first], 1.0, 1.0),
            way("sequential, alone, none", [&first, &second], 0.0, 0.0372),
        ];
        let kept = Kept { documents: 4, questions: 2 * QUESTIONS, ways };
        let read = |draw| kept.draw(draw).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let draws: Vec<Vec<Answer>> = (0..2).map(read).collect();
        for way in &kept.ways {
            let again = of_way(&way.name, &draws, &[]);
            assert_eq!((&again.right, again.anew), (&way.right, way.anew));
            assert!((again.operations - way.operations).abs() < 1e-6, "{}", again.operations);
        }
    }

    #[test]
    fn the_readme_shows_ways_that_were_asked() {
        assert!(SHORT[1..].iter().all(|way| WAYS.contains(way)));
        let table = short().unwrap();
        assert_eq!(table.lines().count(), SHORT.len() + 2);
        assert!(!table.contains('–'), "{table}");
        let readme = include_str!("../../../README.md");
        assert_eq!(
            crate::page::table(readme, TABLE),
            Some(table.trim()),
            "`cargo xtask published --table` writes it"
        );
    }

    #[test]
    fn finals_that_were_kept_are_whole() {
        for Final { documents, draws, ways } in FINALS {
            let kept = read_kept(documents).unwrap().expect("a kept file");
            let names: Vec<&str> = kept.ways.iter().map(|way| &*way.name).collect();
            assert_eq!(names, [&[FULL], ways].concat());
            assert_eq!(kept.questions, draws * QUESTIONS, "{documents} documents");
            assert!(kept.ways.iter().all(|way| way.right.len() == kept.questions), "{documents} documents");
        }
    }

    #[test]
    fn the_page_shows_what_was_kept() {
        let page = include_str!("../../../docs/quality.md");
        let mut rows = crate::page::table(page, TABLE).unwrap().lines().skip(2);
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
