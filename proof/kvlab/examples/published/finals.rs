//! The finals: full attention and a few strategies answer hundreds of local questions.
//!
//! The answers to each draw are kept in a file, so an interrupted run can be continued. The grades are
//! written to `proof/kvlab/tests/published`, from where a run on another machine continues. A test checks the
//! gate's verdicts on them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::models::{Final, Form, MODELS, Published};
use super::plot::{self, PlotPanel, PlotPoint};
use super::{
    AnswerLine, EvalCall, FLOPS, FULL, KEPT, QUALITY, ask, plain, program, read, with_full, write_table,
};
use xtask::published::folder;
use xtask::run::{Result, create_folder, read as read_text, root, write as write_text};

/// The command in the tables' marker line.
const TABLE: &str = "cargo xtask published --answers";

/// The plot that goes with the tables.
const PLOT: &str = "docs/decoys.svg";

/// The first draw of timed questions. They differ from the graded questions.
const TIMED: usize = 1000;

/// A model's questions about one form and number of documents.
#[derive(Clone, Copy)]
struct Asked {
    model: &'static Published,
    of: &'static Final,
}

/// The grades of the answers to such questions.
#[derive(Serialize, Deserialize)]
struct KeptFinal {
    documents: usize,
    /// The number of questions that full attention has answered.
    questions: usize,
    /// Full attention comes first. Other strategies may have answered fewer questions.
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
    /// The time to first token, relative to full attention's on the same question: the median over
    /// the questions asked since the answers were last restored. A busy machine slows both alike.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ttft_share: Option<f64>,
}

/// Returns all questions of a model.
fn all(model: &'static Published) -> impl Iterator<Item = Asked> {
    model.finals.iter().map(move |of| Asked { model, of })
}

/// Asks all questions that have no answers so far, and measures times. All forms and numbers of documents
/// have about equally many answers if the run is interrupted.
pub(super) fn run(model: &'static Published) -> Result {
    let most = model.finals.iter().map(Final::draws).max().unwrap_or(0);
    for asked in all(model) {
        asked.restore()?;
    }
    for draw in 0..most {
        for asked in all(model).filter(|asked| draw < asked.of.draws()) {
            println!("{}, draw {} of {}", asked.name(), draw + 1, asked.of.draws());
            if asked.complete(draw)? {
                asked.keep()?;
            }
        }
    }
    for asked in all(model) {
        let ways: Vec<&str> = asked.of.ways.iter().map(|way| way.name).collect();
        if asked.kept()?.is_some_and(|kept| kept.times(&ways)) {
            continue;
        }
        ask(&ways, asked.call(TIMED), "answers", &asked.times())?;
        asked.keep()?;
    }
    Ok(())
}

impl Asked {
    /// Returns the questions of a draw.
    fn call(self, draw: usize) -> EvalCall {
        let Self { model, of: &Final { form, documents, .. } } = self;
        EvalCall { model, form, documents, first: draw, draws: 1, questions: model.questions, local: true }
    }

    /// Returns a name for messages.
    fn name(self) -> String {
        format!("{}, {}, {} documents", self.model.name, self.of.form.title(), self.of.documents)
    }

    /// Asks a draw's questions with the strategies that have not answered them. Returns true if there were
    /// any.
    fn complete(self, draw: usize) -> Result<bool> {
        let file = self.answers(draw);
        let old = std::fs::read_to_string(&file).unwrap_or_default();
        let known: Vec<String> = if old.is_empty() { Vec::new() } else { names(&read(&file)?) };
        let wanted = self.of.ways.iter().filter(|way| draw < way.draws).map(|way| way.name);
        let missing: Vec<&str> = wanted.filter(|way| !known.iter().any(|known| known == way)).collect();
        if missing.is_empty() {
            return Ok(false);
        }
        let more = file.with_extension("more");
        ask(&missing, self.call(draw), "answers", &more)?;
        write_text(&file, &(old + &read_text(&more)?))?;
        std::fs::remove_file(&more).map_err(|e| format!("{}: {e}", more.display()))?;
        Ok(true)
    }

    /// Restores the draws' answers from the kept grades, with each strategy's average cost.
    fn restore(self) -> Result {
        create_folder(&self.folder())?;
        let Some(kept) = self.kept()? else { return Ok(()) };
        let per_draw = self.model.questions;
        for draw in (0..self.of.draws()).filter(|draw| (draw + 1) * per_draw <= kept.questions) {
            let file = self.answers(draw);
            if !file.exists() {
                write_text(&file, &kept.draw(draw, per_draw))?;
            }
        }
        Ok(())
    }

    /// Returns the folder of the answers.
    fn folder(self) -> PathBuf {
        folder().join("finals").join(self.model.name)
    }

    /// Returns the file of a draw's answers.
    fn answers(self, draw: usize) -> PathBuf {
        self.folder().join(format!("{}-{}-{draw}.jsonl", self.of.form.file(), self.of.documents))
    }

    /// Returns the file of the timed answers.
    fn times(self) -> PathBuf {
        self.folder().join(format!("times-{}-{}.jsonl", self.of.form.file(), self.of.documents))
    }

    /// Returns the path of the kept grades.
    fn path(self) -> PathBuf {
        let file = format!("{}-{}.json", self.of.form.file(), self.of.documents);
        root().join(KEPT).join(self.model.name).join(file)
    }

    /// Reads the kept grades.
    fn kept(self) -> Result<Option<KeptFinal>> {
        let path = self.path();
        if !path.exists() {
            return Ok(None);
        }
        let text = read_text(&path)?;
        serde_json::from_str(&text).map(Some).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// Writes the grades. A strategy's grades end at the first draw that it has not answered.
    fn keep(self) -> Result {
        let Final { documents, ways, .. } = *self.of;
        let files = (0..self.of.draws()).map(|draw| self.answers(draw)).take_while(|file| file.exists());
        let draw_answers = files.map(|file| read(&file)).collect::<Result<Vec<_>>>()?;
        let timed = self.times();
        let timed = if timed.exists() { read(&timed)? } else { Vec::new() };
        let mut results: Vec<WayResult> = Vec::new();
        for way in std::iter::once(FULL).chain(ways.iter().map(|way| way.name)) {
            let has = |answers: &&Vec<AnswerLine>| names(answers).iter().any(|name| name == way);
            let of_way = of_way(way, draw_answers.iter().take_while(has), &timed);
            results.extend(Some(of_way).filter(|result| !result.right.is_empty()));
        }
        // All times must come from one machine, so kept times stay unless all times are new.
        if let Some(before) = self.kept()? {
            let all_new = results.iter().all(|way| way.ttft_ms.is_some());
            for way in &mut results {
                let known = before.ways.iter().find(|known| known.name == way.name);
                if !all_new {
                    way.ttft_ms = known.and_then(|known| known.ttft_ms);
                }
                way.ttft_share = way.ttft_share.or_else(|| known?.ttft_share);
            }
        }
        let Some(full) = results.first() else { return Ok(()) };
        let kept = KeptFinal { documents, questions: full.right.len(), ways: results };
        let text = serde_json::to_string_pretty(&kept).map_err(|e| e.to_string())?;
        create_folder(&root().join(KEPT).join(self.model.name))?;
        write_text(&self.path(), &(text + "\n"))
    }

    /// Returns each strategy's loss with its bounds, computed from the answers.
    fn bounds(self) -> Result<BTreeMap<String, LossBounds>> {
        let mut command = Command::new(program());
        command.args(["eval", "--json"]);
        for file in (0..self.of.draws()).map(|draw| self.answers(draw)).filter(|file| file.exists()) {
            command.arg("--read").arg(file);
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

impl KeptFinal {
    /// Returns the table cells in a strategy's row that come before and after the points it loses.
    fn cells(&self, form: &str, way: &WayResult) -> [String; 2] {
        let share = self.time_share(way).map(|share| format!("{:.0} %", 100.0 * share));
        let time = match (way.ttft_ms, share) {
            (Some(ms), Some(share)) => format!("{ms:.0} ms, {share}"),
            (None, Some(share)) => share,
            (_, None) => "–".to_owned(),
        };
        let (right, asked) = (way.right.matches('1').count(), way.right.len());
        [
            format!("| {form} | {} | {} | {right} of {asked} | ", self.documents, way.name),
            format!(" | {:.0} % | {:.0} % | {time} |", 100.0 * way.recomputed, 100.0 * way.operations),
        ]
    }

    /// Returns a draw's answers as a string of digits.
    fn draw(&self, draw: usize, per_draw: usize) -> String {
        let mut text = String::new();
        for WayResult { name, right, recomputed, operations, .. } in &self.ways {
            for (question, right) in right.bytes().skip(draw * per_draw).take(per_draw).enumerate() {
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

    /// Returns a strategy's time to first token relative to full attention's.
    fn time_share(&self, way: &WayResult) -> Option<f64> {
        way.ttft_ms.zip(self.time(FULL)).map(|(ms, full)| ms / full).or(way.ttft_share)
    }

    /// Returns true if the times of all strategies are known.
    fn times(&self, ways: &[&str]) -> bool {
        ways.iter().chain([&FULL]).all(|way| self.time(way).is_some())
    }
}

/// Collects a strategy's answers, question by question. If there are several answers to a question, only the
/// first one is used.
fn of_way<'a>(
    way: &str,
    draws: impl IntoIterator<Item = &'a Vec<AnswerLine>>,
    timed: &[AnswerLine],
) -> WayResult {
    let mut of_questions: BTreeMap<(usize, usize), (bool, f64, f64)> = BTreeMap::new();
    let mut time_shares = Vec::new();
    for (answer, full) in draws.into_iter().flat_map(|answers| with_full(answers)) {
        if plain(&answer.name) == way {
            let right = answer.right.unwrap_or(false);
            let question = (answer.draw, answer.question);
            of_questions.entry(question).or_insert((right, answer.recomputed, answer.flops / full.flops));
            // Restored answers have no times.
            time_shares.extend((full.ttft_ms > 0.0).then(|| answer.ttft_ms / full.ttft_ms));
        }
    }
    let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / of_questions.len().max(1) as f64;
    let recomputed = mean(&mut of_questions.values().map(|(_, share, _)| *share));
    let operations = mean(&mut of_questions.values().map(|(_, _, share)| *share));
    let times = timed.iter().filter(|answer| plain(&answer.name) == way).map(|answer| answer.ttft_ms);
    WayResult {
        name: way.to_owned(),
        right: of_questions.values().map(|(right, ..)| if *right { '1' } else { '0' }).collect(),
        recomputed: rounded(recomputed),
        operations: rounded(operations),
        ttft_ms: median(times.collect()).map(|ms| (ms * 10.0).round() / 10.0),
        ttft_share: median(time_shares).map(rounded),
    }
}

/// Returns the median, or `None` if there are no values.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
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

/// Writes the tables in docs/quality.md, one for each model with answers.
pub(super) fn write() -> Result {
    let mut tables = Vec::new();
    for model in &MODELS {
        let mut rows = String::new();
        for asked in all(model) {
            asked.restore()?;
            asked.keep()?;
            let Some(kept) = asked.kept()? else { continue };
            let bounds = asked.bounds()?;
            for way in &kept.ways {
                let lost = match bounds.get(&way.name).filter(|_| way.name != FULL) {
                    Some(LossBounds { loss, at_least, at_most }) => {
                        let [loss, least, most] = [loss, at_least, at_most].map(|share| 100.0 * share);
                        format!("{loss:.1} ({least:.1} to {most:.1})")
                    }
                    None => "–".to_owned(),
                };
                let [right, costs] = kept.cells(asked.of.form.title(), way);
                let _ = writeln!(rows, "{right}{lost}{costs}");
            }
        }
        if !rows.is_empty() {
            tables.push(format!("{}\n{rows}", heading(model)));
        }
    }
    plot::draw(&root().join(PLOT), &panels()?)?;
    write_table(QUALITY, TABLE, &tables.join("\n"))
}

/// Returns the plot's panels: local questions about four firms, for each instruct model with answers.
fn panels() -> Result<Vec<PlotPanel>> {
    let mut panels = Vec::new();
    for model in MODELS.iter().filter(|model| model.chat) {
        let four = all(model).find(|asked| (asked.of.form, asked.of.documents) == (Form::Firms, 4));
        let Some(kept) = four.map(Asked::kept).transpose()?.flatten() else { continue };
        // A strategy without a measured time is not in the plot.
        let percent = |way: &WayResult| {
            let right = way.right.matches('1').count() as f64 / way.right.len() as f64;
            let time = kept.time_share(way)?;
            Some(PlotPoint { name: way.name.clone(), time: 100.0 * time, right: 100.0 * right })
        };
        let points = kept.ways.iter().filter_map(percent).collect();
        panels.push(PlotPanel { title: model.title.to_owned(), points });
    }
    Ok(panels)
}

/// Returns the lines in front of a model's rows.
fn heading(model: &Published) -> String {
    format!(
        "**{}**\n\n\
         | texts | documents | positions, mode, recomputed | right | points lost | tokens recomputed | operations | time to \
         first token |\n\
         |---|---|---|---|---|---|---|---|",
        model.title
    )
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
            ttft_share: None,
        };
        let (first, second) = ("10".repeat(10), "0".repeat(20));
        let ways = vec![
            way(FULL, [&second, &first], 1.0, 1.0),
            way("sequential, alone, none", [&first, &second], 0.0, 0.0372),
        ];
        let kept = KeptFinal { documents: 4, questions: 40, ways };
        let read =
            |draw| kept.draw(draw, 20).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
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
        let notes = |documents: usize| {
            let found =
                all(&MODELS[0]).find(|asked| (asked.of.form, asked.of.documents) == (Form::Firms, documents));
            found.unwrap().kept().unwrap().expect("a kept file")
        };
        let [two, four] = [2, 4].map(notes);
        let default = |name: &str| name == "sequential, with-system, question:0.5";
        let decoys = |name: &str| name.contains("behind") || name.contains("slots");
        let none = |name: &str| name.ends_with(", none") && !decoys(name);
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
    fn kept_grades_are_whole_draws_that_full_attention_has_answered() {
        for asked in MODELS.iter().flat_map(all) {
            let Some(kept) = asked.kept().unwrap() else { continue };
            let place = asked.name();
            let names: Vec<&str> = kept.ways.iter().map(|way| &*way.name).collect();
            let known = asked.of.ways.iter().map(|way| way.name).filter(|way| names.contains(way));
            assert_eq!(names, [FULL].into_iter().chain(known).collect::<Vec<_>>(), "{place}");
            assert_eq!(kept.ways[0].right.len(), kept.questions, "{place}");
            for way in &kept.ways {
                let answers = way.right.len();
                assert!(answers <= kept.questions && answers > 0, "{place}: {}", way.name);
                assert_eq!(answers % asked.model.questions, 0, "{place}: {}", way.name);
            }
            assert_eq!(kept.documents, asked.of.documents, "{place}");
            let is_in_readme = asked.model.name == MODELS[0].name
                && asked.of.form == Form::Firms
                && matches!(asked.of.documents, 2 | 4);
            assert!(!is_in_readme || kept.questions == 400, "{place}: {} questions", kept.questions);
        }
        let kept = all(&MODELS[0]).filter(|asked| asked.kept().unwrap().is_some());
        assert!(kept.count() >= 3, "the first model has answered");
    }

    #[test]
    fn the_plot_shows_the_kept_finals() {
        let folder = std::env::temp_dir().join(format!("kvlab-plot-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("decoys.svg");
        plot::draw(&file, &panels().unwrap()).unwrap();
        let (drawn, kept) = (read_text(&file).unwrap(), read_text(&root().join(PLOT)).unwrap());
        assert!(drawn == kept, "{PLOT} is old; `cargo xtask published --table` draws it");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_page_shows_the_kept_finals() {
        let page = include_str!("../../../../docs/quality.md");
        let mut lines = xtask::page::table(page, TABLE).unwrap().lines().filter(|line| !line.is_empty());
        let written = "`cargo xtask published --table` writes it";
        for model in &MODELS {
            let kept: Vec<_> = all(model)
                .filter_map(|asked| Some((asked.of.form.title(), asked.kept().unwrap()?)))
                .collect();
            if kept.is_empty() {
                continue;
            }
            for line in heading(model).lines().filter(|line| !line.is_empty()) {
                assert_eq!(lines.next(), Some(line), "{written}");
            }
            for (form, kept) in &kept {
                for way in &kept.ways {
                    let [right, costs] = kept.cells(form, way);
                    let row = lines.next().unwrap_or_default();
                    let same = row.starts_with(&right) && row.ends_with(&costs);
                    assert!(same, "{row}\n{right}…{costs}: {written}");
                }
            }
        }
        assert_eq!(lines.next(), None);
    }
}
