//! The model in the repository: right answers to questions about documents that it never saw.

use std::path::PathBuf;

use kvbackend_cpu::CpuBackend;
use kvchunk::ReuseCell;
use kvmodel::{Engine, EngineConfig, ModelDirectory, Request, TextCodec, WeightFormat};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

/// Documents of facts and one question per fact whose answer stands in its own document.
struct Trial {
    documents: Vec<String>,
    questions: Vec<(String, String)>,
}

struct World {
    names: Vec<String>,
    values: Vec<String>,
}

impl World {
    fn load() -> Self {
        let text = std::fs::read_to_string(folder().join("world.json")).unwrap();
        let world: serde_json::Value = serde_json::from_str(&text).unwrap();
        let list = |name: &str| {
            world[name].as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect()
        };
        Self { names: list("names"), values: list("values") }
    }

    /// Documents drawn anew; one fact in six is a local reference.
    fn trial(&self, rng: &mut StdRng) -> Trial {
        let mut names = self.names.clone();
        names.shuffle(rng);
        let (mut documents, mut questions) = (Vec::new(), Vec::new());
        for _ in 0..rng.random_range(2..=8) {
            let (mut facts, mut last): (Vec<String>, Option<&String>) = (Vec::new(), None);
            for _ in 0..rng.random_range(2..=6) {
                let name = names.pop().unwrap();
                let (written, value) = match last {
                    Some(value) if rng.random_range(0..6) == 0 => ("same", value),
                    _ => {
                        let value = self.values.choose(rng).unwrap();
                        (value.as_str(), value)
                    }
                };
                facts.push(format!("{name} is {written} ."));
                questions.push((format!("{name} ?"), value.clone()));
                last = Some(value);
            }
            documents.push(facts.join(" "));
        }
        questions.shuffle(rng);
        questions.truncate(4);
        Trial { documents, questions }
    }
}

/// System prompts, most of them of words that are no single tokens.
const SYSTEMS: [&str; 4] = [
    "you answer questions from short documents .",
    "answer briefly",
    "Answer the question using the documents below.",
    "You are a helpful assistant. Context:",
];

/// What a cell changes of a request.
type Change = Box<dyn Fn(&mut Request)>;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag")
}

fn right(
    engine: &mut Engine,
    codec: &TextCodec,
    trial: &Trial,
    rng: &mut StdRng,
    change: &dyn Fn(&mut Request),
) -> usize {
    let mut documents = trial.documents.clone();
    let ask = |(question, answer): &(String, String)| {
        documents.shuffle(rng);
        let system = SYSTEMS.choose(rng).unwrap();
        let text = format!("{system}##{}##{question}", documents.join("##"));
        let mut request =
            Request { max_new_tokens: 4, ..Request::new(codec.prompt(&text, "##", true).unwrap()) };
        change(&mut request);
        let tokens = engine.generate(&request, &mut ()).unwrap().tokens;
        usize::from(codec.decode(&tokens).unwrap().trim() == answer)
    };
    trial.questions.iter().map(ask).sum()
}

#[test]
fn local_questions_are_answered_under_full_attention_and_in_every_exact_cell() {
    let ModelDirectory { model, codec } =
        ModelDirectory::load(&folder(), WeightFormat::F32, &mut |_, _| ()).unwrap();
    let mut engine = Engine::new(model, CpuBackend::new(), codec.digest(), &EngineConfig::default()).unwrap();
    let world = World::load();
    let cells: [(&str, Change); 4] = [
        ("full attention", Box::new(|r| r.full_attention = true)),
        ("overlapped, with-system", Box::new(|r| r.cell = ReuseCell::ALL[0])),
        ("overlapped, alone", Box::new(|r| r.cell = ReuseCell::ALL[1])),
        ("sequential, alone", Box::new(|r| r.cell = ReuseCell::ALL[2])),
    ];
    for (name, change) in cells {
        let mut rng = StdRng::seed_from_u64(20_261_120);
        let (mut correct, mut asked) = (0, 0);
        for _ in 0..40 {
            let trial = world.trial(&mut rng);
            asked += trial.questions.len();
            correct += right(&mut engine, &codec, &trial, &mut rng, &change);
        }
        let share = f64::from(correct as u32) / f64::from(asked as u32);
        println!("{name}: {correct} of {asked} right ({:.1} %)", 100.0 * share);
        assert!(share >= 0.95, "{name}: {share}");
    }
    engine.check_invariants().unwrap();
}

#[test]
fn any_text_encodes_and_long_prompts_fit() {
    let ModelDirectory { model, codec } =
        ModelDirectory::load(&folder(), WeightFormat::F32, &mut |_, _| ()).unwrap();
    assert!(model.config().max_positions >= 1024);
    for text in ["Zürich, 東京 and 🚆!", "\u{0}\u{7f}", "ALBA   is\nred"] {
        let tokens = codec.encode(text, true).unwrap();
        assert!(tokens.iter().all(|&t| (t as usize) < model.config().vocab_size));
        let normalised = text.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(codec.decode(&tokens).unwrap().trim(), normalised);
    }
}
