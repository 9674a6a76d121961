//! The state of a soak in a file, so that an interrupted one goes on.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::tally::Count;

/// The progress of a soak.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) seed: u64,
    /// The seconds of traffic.
    pub(crate) seconds: f64,
    /// The number of times between two checkpoints. Each draws its own requests.
    pub(crate) segments: u64,
    /// The requests of each kind.
    pub(crate) counts: BTreeMap<String, Count>,
    /// The identity of the program. Another build begins anew.
    build: String,
    /// The file of the state.
    #[serde(skip)]
    file: PathBuf,
}

impl State {
    /// Reads the state of an interrupted soak of this build and, if one is given, this seed. Otherwise begins a new one.
    /// Returns true if there was one.
    pub(crate) fn resume(folder: &Path, seed: Option<u64>, clock: u64) -> std::io::Result<(Self, bool)> {
        let (build, file) = (build()?, folder.join("state.json"));
        let saved = fs::read_to_string(&file).ok().and_then(|text| serde_json::from_str::<Self>(&text).ok());
        let fits = |state: &Self| state.build == build && seed.is_none_or(|seed| seed == state.seed);
        if let Some(state) = saved.filter(fits) {
            return Ok((Self { file, ..state }, true));
        }
        let seed = seed.unwrap_or(clock);
        Ok((Self { seed, seconds: 0.0, segments: 0, counts: BTreeMap::new(), build, file }, false))
    }

    /// Writes the state.
    pub(crate) fn save(&self) -> std::io::Result<()> {
        let text = serde_json::to_string(self).map_err(std::io::Error::other)?;
        // A process that is killed while it writes leaves the old state.
        let new = self.file.with_extension("new");
        fs::write(&new, text)?;
        fs::rename(new, &self.file)
    }

    /// Removes the file after the last checkpoint.
    pub(crate) fn end(&self) -> std::io::Result<()> {
        fs::remove_file(&self.file)
    }
}

/// Creates the folder of a soak, and locks it until the process ends or the file is dropped.
///
/// # Errors
/// Returns an error if another soak has locked it.
pub(crate) fn lock(folder: &Path) -> std::io::Result<File> {
    fs::create_dir_all(folder)?;
    let file = File::create(folder.join("lock"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(std::io::Error::other(format!("another soak runs in {}", folder.display())))
        }
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Returns what identifies this build: the program's size and its time.
fn build() -> std::io::Result<String> {
    let program = fs::metadata(std::env::current_exe()?)?;
    let time = program.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(format!("{}-{}", program.len(), time.as_millis()))
}
