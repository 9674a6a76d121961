//! Rotary embeddings of every kind against Hugging Face transformers, from config.json to a rotated key, at
//! positions up to 131071; see `proof/goldens/models/tables.py`.

use crate::common::folder;
use kvcore::Rope;
use kvcore::rotate_row;
use kvmodel::ModelConfig;
use rstest::rstest;
use safetensors::SafeTensors;

/// Half the distance between neighbouring f32 numbers just below 1.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

struct Tables(Vec<u8>);

impl Tables {
    fn load() -> Self {
        Self(std::fs::read(folder("rope").join("tables.safetensors")).expect("tables"))
    }

    fn words(&self, kind: &str, name: &str) -> Vec<u32> {
        let file = SafeTensors::deserialize(&self.0).expect("safetensors");
        let data = file.tensor(&format!("{kind}.{name}")).expect(name).data().to_vec();
        data.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
    }

    fn floats(&self, kind: &str, name: &str) -> Vec<f32> {
        self.words(kind, name).into_iter().map(f32::from_bits).collect()
    }
}

#[rstest]
fn tables_equal_transformers(
    #[values(
        "default",
        "linear",
        "static-ntk",
        "dynamic-original",
        "dynamic",
        "llama3",
        "yarn",
        "yarn-untruncated",
        "longrope-short",
        "longrope-long",
        "partial",
        "partial-yarn",
        "interleaved",
        "interleaved-yarn"
    )]
    kind: &str,
) {
    let kinds = std::fs::read_to_string(folder("rope").join("kinds.json")).unwrap();
    let kinds: serde_json::Value = serde_json::from_str(&kinds).unwrap();
    let model = ModelConfig::from_json(&kinds[kind]["config"].to_string()).unwrap();
    let longest = kinds[kind]["longest"].as_u64().unwrap() as usize;
    let config = model.layers[0].rope.clone();
    let regime = config.regime(longest);
    let rope = Rope::in_regime(config, regime, model.max_positions).unwrap();
    let tables = Tables::load();

    // Both sides round `theta^x`. The reference's vectorised power function is accurate to one unit in
    // the last place.
    let expected = tables.floats(kind, "inv_freq");
    assert_eq!(rope.frequencies().len(), expected.len());
    let mut equal = 0;
    for (i, (ours, theirs)) in rope.frequencies().iter().zip(&expected).enumerate() {
        let apart = ours.to_bits().abs_diff(theirs.to_bits());
        assert!(apart <= 1, "inv_freq[{i}]: {ours} and {theirs}, {apart} units apart");
        equal += usize::from(apart == 0);
    }
    println!("{kind}: {equal} of {} frequencies equal to the bit", expected.len());
    assert!(10 * equal >= 9 * expected.len(), "{equal} of {}", expected.len());
    let factor = rope.attention_factor();
    assert_eq!(factor, tables.floats(kind, "attention_factor")[0]);

    let positions = tables.words(kind, "positions");
    let table = rope.table(positions.iter().map(|&p| i64::from(p))).unwrap();
    let (half, key) = (expected.len(), tables.floats(kind, "key"));
    let (cos, sin, rotated) =
        (tables.floats(kind, "cos"), tables.floats(kind, "sin"), tables.floats(kind, "rotated"));
    let mut worst = 0f64;
    for (row, &position) in positions.iter().enumerate() {
        let mut our_sin = vec![0.0; half];
        let our_cos = table.at(i64::from(position), &mut our_sin).to_vec();
        // The reference's angle is rounded to f32: half a unit of `position * frequency`, plus one unit of
        // rounding.
        let bound = (UNIT * f64::from(position.max(1)) + UNIT) * f64::from(factor);
        for (ours, theirs) in [(&our_cos, &cos), (&our_sin, &sin)] {
            for (i, x) in ours.iter().enumerate() {
                let apart = (f64::from(x * factor) - f64::from(theirs[row * half + i])).abs();
                assert!(apart <= bound, "{kind}, position {position}, pair {i}: {apart:.2e} > {bound:.2e}");
                worst = worst.max(apart / bound);
            }
        }
        let mut ours = key.clone();
        rotate_row(&mut ours, &our_cos, &our_sin, factor, rope.pairing());
        let largest = key.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max);
        for (i, (x, y)) in ours.iter().zip(&rotated[row * key.len()..]).enumerate() {
            let apart = f64::from(x - y).abs();
            assert!(
                apart <= 2.0 * largest * (bound + UNIT),
                "{kind}, position {position}, element {i}: {apart:.2e}"
            );
        }
        assert_eq!(ours[2 * half..], rotated[row * key.len() + 2 * half..(row + 1) * key.len()]);
    }
    println!("{kind}: largest difference {worst:.2} of the bound");
}
