//! The steps of a check, and the code that runs them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use kvbench::rows::{LargestRow, largest};
use kvbench::table;
use serde::Deserialize;
use xtask::counts::counted;
use xtask::run::Result;

use super::machine::{Found, libraries};
use super::peers;
use super::process::{self, Ran, last_line};
use super::programs::{PEERS, Programs};
use super::report::{CardOutcome, EndedStep};
use super::{SLOW, absolute};

/// A step. To add one, add a line to [`STEPS`].
pub(super) struct CardStep {
    pub(super) name: &'static str,
    /// A description of what the step checks, for the report.
    pub(super) about: &'static str,
    /// The time limit in seconds, after which the step's programs are killed.
    limit: u64,
    /// True if the double can replace a card.
    on_double: bool,
    work: fn(&mut Site, &mut Here) -> Result<CardOutcome>,
}

/// The steps, in order. Together they take less than ten minutes.
pub(super) const STEPS: &[CardStep] = &[
    CardStep {
        name: "conformance",
        about: "The conformance suite in all element types, on the first two cards",
        limit: 110,
        on_double: true,
        work: |site, here| site.conform(here),
    },
    CardStep {
        name: "suite",
        about: "The backend's own tests, except for tests that need the double of the driver",
        limit: 100,
        on_double: true,
        work: |site, here| site.tests(here, "suite", &[]),
    },
    CardStep {
        name: "collectives",
        about: "Collectives through NCCL, for groups of one to four cards, as far as the machine has them",
        limit: 20,
        on_double: true,
        work: |site, here| site.tests(here, "collectives", &["devices_exchange"]),
    },
    CardStep {
        name: "memcheck",
        about: "Some cases of the conformance suite under compute-sanitizer, which finds accesses out of bounds",
        limit: 60,
        on_double: false,
        work: |site, here| site.sanitizer(here, "memcheck", MEMCHECK),
    },
    CardStep {
        name: "racecheck",
        about: "Some cases under compute-sanitizer, which finds races in shared memory",
        limit: 60,
        on_double: false,
        work: |site, here| site.sanitizer(here, "racecheck", RACECHECK),
    },
    CardStep {
        name: "kernels",
        about: "Every kernel against the driver's own copy of as many bytes, as `cargo xtask bench --backend cuda` runs them",
        limit: 110,
        on_double: true,
        work: |site, here| site.kernels(here),
    },
    CardStep {
        name: "wgpu",
        about: "The kernels of wgpu through Vulkan, on an adapter in hardware",
        limit: 45,
        on_double: false,
        work: |site, here| site.wgpu(here),
    },
    CardStep {
        name: "peers",
        about: "Other software, torch, Triton and FlashInfer, at the same sizes, where they are installed",
        limit: 65,
        on_double: false,
        work: |site, here| site.peers(here),
    },
    CardStep {
        name: "demo",
        about: "Answers of `kvc demo` on the card against those on the processor",
        limit: 15,
        on_double: true,
        work: |site, here| site.demo(here),
    },
    CardStep {
        name: "tokens",
        about: "Tokens of `kvc run` on the card against those on the processor",
        limit: 15,
        on_double: true,
        work: |site, here| site.tokens(here),
    },
];

/// Name prefixes of the cases that run under memcheck. There is at least one for each kind of kernel.
const MEMCHECK: &[&str] = &[
    "tensor::any",
    "rows::gather",
    "rows::scatter_puts",
    "blocks::copy",
    "blocks::rotated",
    "attend::prefill",
    "attend::many",
    "quant::attend",
    "quant::blocks",
    "mla::the_latent",
    "sparse::rows_see_selected_blocks",
    "graphs::replays_follow",
];

/// Name prefixes of the cases that run under racecheck: kernels with shared memory.
const RACECHECK: &[&str] = &["attend::prefill", "attend::many", "quant::attend", "mla::the_latent"];

/// The folder with an installed toolkit's programs.
const TOOLKIT: &str = "/usr/local/cuda/bin";

/// The exit code with which the sanitizer reports an error in the program.
const FOUND: &str = "9";

/// Prompts whose answers are compared, each with an earlier prompt about the same documents.
const PROMPTS: [(&str, &str); 2] = [
    (
        "you answer questions ## alba is red . ## cedo is blue . bora is same . ## bora ?",
        "you answer questions ## cedo is blue . bora is same . ## alba is red . ## alba ?",
    ),
    (
        "you answer questions ## alba is red . ## bora is blue . ## alba ?",
        "you answer questions ## alba is red . ## alba ?",
    ),
];

/// The programs, the machine and the results that steps share.
pub(super) struct Site {
    programs: Programs,
    found: Found,
    out: PathBuf,
    double: bool,
    /// Our kernels' rows.
    ours: Vec<LargestRow>,
}

/// A running step.
struct Here {
    name: &'static str,
    deadline: Instant,
    /// The details so far, in Markdown.
    section: String,
}

impl Site {
    pub(super) fn new(programs: Programs, found: Found, out: &Path, double: bool) -> Self {
        Self { programs, found, out: absolute(out), double, ours: Vec::new() }
    }

    /// Returns the folder for the results.
    pub(super) fn out(&self) -> &Path {
        &self.out
    }

    /// Runs a step. An error is part of the outcome.
    pub(super) fn run(&mut self, step: &CardStep) -> EndedStep {
        let start = Instant::now();
        let limit = if self.double { SLOW * step.limit } else { step.limit };
        let deadline = start + Duration::from_secs(limit);
        let mut here = Here { name: step.name, deadline, section: String::new() };
        let outcome = if self.double && !step.on_double {
            CardOutcome::Skipped("it needs a card".to_owned())
        } else {
            (step.work)(self, &mut here).unwrap_or_else(CardOutcome::Failed)
        };
        EndedStep { outcome, seconds: start.elapsed().as_secs_f64(), section: here.section }
    }

    /// Runs a command until the step's time is up.
    fn finish(&self, mut command: Command, here: &Here, part: &str) -> Result<Ran> {
        libraries(&mut command, self.double)?;
        let name = if part.is_empty() { here.name.to_owned() } else { format!("{}-{part}", here.name) };
        process::run(&mut command, &self.out, &name, here.deadline)
    }

    fn program(&self, name: &str, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(self.programs.path(name)?);
        command.args(args).current_dir(&self.out);
        Ok(command)
    }

    fn conform(&self, here: &mut Here) -> Result<CardOutcome> {
        let ran = self.finish(self.program("conform", &["--backend", "cuda"])?, here, "")?;
        Ok(judged(here, &ran))
    }

    /// Runs some of a program's tests.
    fn tests(&self, here: &mut Here, program: &str, chosen: &[&str]) -> Result<CardOutcome> {
        let ran = self.finish(self.program(program, &[&["--show-output"], chosen].concat())?, here, "")?;
        let sums = counted(&ran.output);
        let skipped = ran.output.lines().filter(|line| line.trim_start().starts_with("SKIPPED"));
        let mut reasons: Vec<&str> = skipped.map(str::trim).collect();
        reasons.sort_unstable();
        reasons.dedup();
        here.section = reasons.join("\n");
        match &ran.failure {
            None if sums.passed == 0 => Ok(CardOutcome::Skipped(reasons.join("; "))),
            None => Ok(CardOutcome::Passed(sums.to_string())),
            Some(failure) => {
                here.section = block(&tail(&ran.output));
                Ok(CardOutcome::Failed(format!("{sums}; {failure}")))
            }
        }
    }

    fn sanitizer(&self, here: &mut Here, tool: &str, prefixes: &[&str]) -> Result<CardOutcome> {
        let Some(sanitizer) = installed("compute-sanitizer") else {
            let why = format!("compute-sanitizer is neither on the PATH nor in {TOOLKIT}");
            return Ok(CardOutcome::Skipped(why));
        };
        let mut command = Command::new(sanitizer);
        command.current_dir(&self.out).args(["--tool", tool, "--error-exitcode", FOUND]);
        command.arg(self.programs.path("conform")?).args(["--backend", "cuda"]);
        for prefix in prefixes {
            command.args(["--only", prefix]);
        }
        let ran = self.finish(command, here, "")?;
        Ok(judged(here, &ran))
    }

    fn kernels(&mut self, here: &mut Here) -> Result<CardOutcome> {
        let ran = self.finish(self.program("kernels_on_cuda", &[])?, here, "")?;
        self.ours = largest(&ran.output);
        Ok(tabled(here, &ran))
    }

    fn wgpu(&self, here: &mut Here) -> Result<CardOutcome> {
        let [adapter, ..] = &self.found.adapters[..] else {
            return Ok(CardOutcome::Skipped("Vulkan has no adapter in hardware here".to_owned()));
        };
        let mut command = self.program("kernels_on_wgpu", &[])?;
        command.env("WGPU_BACKEND", "vulkan");
        let ran = self.finish(command, here, "")?;
        let outcome = tabled(here, &ran);
        here.section = format!("On {adapter}.\n\n{}", here.section);
        Ok(outcome)
    }

    fn peers(&self, here: &mut Here) -> Result<CardOutcome> {
        let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        let mut command = Command::new(&python);
        command.arg(self.programs.path(PEERS.0)?).current_dir(&self.out);
        let ran = match self.finish(command, here, "") {
            Ok(ran) => ran,
            Err(reason) => return Ok(CardOutcome::Skipped(reason)),
        };
        let rows = peers::rows(&ran.output);
        here.section = peers::table(&rows, &self.ours);
        let measured = rows.iter().filter(|row| row.seconds.is_some()).count();
        Ok(match ran.failure {
            Some(failure) => CardOutcome::Failed(failure),
            None if measured == 0 => {
                let first = rows.iter().find_map(|row| row.skipped.clone());
                CardOutcome::Skipped(first.unwrap_or_else(|| "it measured nothing".to_owned()))
            }
            None => CardOutcome::Passed(format!("{measured} of {} measured", rows.len())),
        })
    }

    /// Runs `kvc` on the CPU and on the card. Returns both outputs, or the failure of either.
    fn twice(&self, here: &Here, part: &str, args: &[&str]) -> Result<[String; 2]> {
        let on = |backend: &str| {
            let command = self.program("kvc", &[args, &["--backend", backend, "--json"]].concat())?;
            let ran = self.finish(command, here, &format!("{part}{backend}"))?;
            match ran.failure {
                None => Ok(ran.output),
                Some(failure) => Err(format!("on {backend}: {failure}")),
            }
        };
        Ok([on("cpu")?, on("cuda")?])
    }

    fn demo(&self, here: &mut Here) -> Result<CardOutcome> {
        #[derive(Deserialize, PartialEq)]
        struct Answer {
            answer: String,
            reused_tokens: usize,
        }
        let [cpu, cuda] = self.twice(here, "", &["demo"])?;
        let read =
            |json: &str| serde_json::from_str::<Vec<Answer>>(json).map_err(|e| format!("kvc demo: {e}"));
        let (cpu, cuda) = (read(&cpu)?, read(&cuda)?);
        let answers = cuda.iter().map(|it| it.answer.as_str()).collect::<Vec<_>>().join(", ");
        Ok(if cpu == cuda {
            CardOutcome::Passed(format!("{} equal answers: {answers}", cuda.len()))
        } else {
            CardOutcome::Failed(format!("other answers or reuse than on the processor: {answers}"))
        })
    }

    fn tokens(&self, here: &mut Here) -> Result<CardOutcome> {
        #[derive(Deserialize)]
        struct Generated {
            tokens: Vec<u32>,
            cached_tokens: usize,
            graphs: Option<Graphs>,
        }
        #[derive(Deserialize)]
        struct Graphs {
            replayed: usize,
        }
        let read = |json: &str| serde_json::from_str::<Generated>(json).map_err(|e| format!("kvc run: {e}"));
        let (mut compared, mut replayed) = (0, 0);
        let by_graphs = PROMPTS.iter().map(|prompt| (prompt, "16"));
        let runs = by_graphs.chain(PROMPTS.iter().map(|prompt| (prompt, "0")));
        for (i, ((prompt, warm), graphs)) in runs.enumerate() {
            // The second decode step is captured, and later ones are replayed.
            let args = [
                "run",
                "--separator",
                "##",
                "--graphs",
                graphs,
                "--prompt",
                prompt,
                "--warm",
                warm,
                "--warm",
                prompt,
                "--warm",
                warm,
            ];
            let [cpu, cuda] = self.twice(here, &format!("{i}-"), &args)?;
            let (cpu, cuda) = (read(&cpu)?, read(&cuda)?);
            if cpu.tokens != cuda.tokens || cpu.cached_tokens != cuda.cached_tokens {
                let why =
                    format!("{:?} on the card, {:?} on the processor: {prompt}", cuda.tokens, cpu.tokens);
                return Ok(CardOutcome::Failed(why));
            }
            compared += cuda.tokens.len();
            replayed += cuda.graphs.map_or(0, |graphs| graphs.replayed);
        }
        if replayed == 0 {
            return Ok(CardOutcome::Failed("no decode step was a replay of a graph".to_owned()));
        }
        let prompts = PROMPTS.len();
        Ok(CardOutcome::Passed(format!(
            "{prompts} prompts with graphs and without, {compared} equal tokens, {replayed} steps replayed"
        )))
    }
}

/// Returns the outcome of a program whose last line is its summary. If it failed, shows the end of its
/// output.
fn judged(here: &mut Here, ran: &Ran) -> CardOutcome {
    let sum = last_line(&ran.output).unwrap_or("it printed nothing").to_owned();
    match &ran.failure {
        None => CardOutcome::Passed(sum),
        Some(failure) => {
            here.section = block(&tail(&ran.output));
            CardOutcome::Failed(format!("{failure}; {sum}"))
        }
    }
}

/// Returns a benchmark's outcome. Shows its table, even if the benchmark was killed.
fn tabled(here: &mut Here, ran: &Ran) -> CardOutcome {
    let table = table::printed(&ran.output);
    here.section = table.clone().unwrap_or_default();
    match (&ran.failure, table) {
        (Some(failure), _) => CardOutcome::Failed(failure.clone()),
        (None, None) => CardOutcome::Failed("it printed no row".to_owned()),
        (None, Some(table)) if table.contains("test double") => {
            CardOutcome::Passed("every kernel runs; with the double, times mean nothing".to_owned())
        }
        (None, Some(table)) => {
            let count = |word| table.matches(word).count();
            let (reached, missed) = (count(", reached |"), count("**missed**"));
            CardOutcome::Passed(format!("{reached} targets reached, {missed} missed"))
        }
    }
}

/// Returns the path of a program on the `PATH` or in the toolkit.
fn installed(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from(TOOLKIT)]).collect::<Vec<_>>();
    folders.into_iter().map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Returns the last lines of an output.
fn tail(output: &str) -> String {
    const LINES: usize = 40;
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// Formats text as a code block.
fn block(text: &str) -> String {
    format!("```text\n{text}\n```\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> Here {
        Here { name: "a", deadline: Instant::now(), section: String::new() }
    }

    fn ran(output: &str, failure: Option<&str>) -> Ran {
        Ran { output: output.to_owned(), failure: failure.map(str::to_owned) }
    }

    #[test]
    fn all_steps_together_stay_below_ten_minutes_and_have_names_of_their_own() {
        assert!(STEPS.iter().map(|step| step.limit).sum::<u64>() <= 600);
        for (i, step) in STEPS.iter().enumerate() {
            assert!(STEPS[..i].iter().all(|other| other.name != step.name));
            assert!(!step.about.ends_with('.') && step.about.starts_with(char::is_uppercase));
        }
        let through_the_double: Vec<&str> =
            STEPS.iter().filter(|it| it.on_double).map(|it| it.name).collect();
        assert_eq!(through_the_double, ["conformance", "suite", "collectives", "kernels", "demo", "tokens"]);
    }

    #[test]
    fn selected_cases_are_cases_of_the_suite() {
        let cases = include_str!("../../../kvconform/src/cases/mod.rs");
        for prefix in MEMCHECK.iter().chain(RACECHECK) {
            assert!(cases.contains(&format!("\n    {prefix}")), "no case begins with {prefix}");
        }
    }

    #[test]
    fn a_program_is_judged_by_its_exit_and_its_last_line() {
        let mut step = here();
        assert_eq!(
            judged(&mut step, &ran("a\n3 passed\n", None)),
            CardOutcome::Passed("3 passed".to_owned())
        );
        assert!(step.section.is_empty());
        let failed = judged(&mut step, &ran("a\n1 failed\n", Some("exit 1")));
        assert_eq!(failed, CardOutcome::Failed("exit 1; 1 failed".to_owned()));
        assert!(step.section.contains("a\n1 failed"));
    }

    #[test]
    fn a_benchmark_that_was_ended_keeps_its_rows() {
        let row = r#"{"what":"cuda: scatter bf16","size":4,"unit":"bytes","seconds":1,"limit":"cuMemcpyDtoD","limit_seconds":1,"ratio":1}"#;
        let mut step = here();
        let passed = tabled(&mut step, &ran(row, None));
        assert_eq!(passed, CardOutcome::Passed("1 targets reached, 0 missed".to_owned()));
        assert_eq!(tabled(&mut step, &ran(row, Some("late"))), CardOutcome::Failed("late".to_owned()));
        assert!(step.section.contains("| cuda: scatter bf16 |"));
        assert!(matches!(tabled(&mut step, &ran("", None)), CardOutcome::Failed(_)));
    }

    #[test]
    fn only_the_end_of_a_long_output_is_shown() {
        let lines: Vec<String> = (0..100).map(|i| i.to_string()).collect();
        let end = tail(&lines.join("\n"));
        assert!(end.starts_with("60\n") && end.ends_with("99"));
        assert_eq!(installed("no-such-program-at-all"), None);
    }
}
