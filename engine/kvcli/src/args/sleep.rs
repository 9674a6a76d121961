//! Options for sleeping documents.

use clap::Args;
use kvchunk::SleepForm;
use kvengine::ChunkSleep;
use kvmanager::TierThresholds;

use super::at_least_one;

/// Options for sleeping documents, shared by all commands that reuse documents.
#[derive(Debug, Args)]
pub(crate) struct SleepArgs {
    /// Move documents to host memory when the device fills, and back on a hit. The form is plain
    /// (unchanged), compressed (without loss), or a format with fewer bits (int8, int4, fp8-e4m3 or fp8-e5m2,
    /// as for --dtype). With fewer bits, the error of later hits is unbounded.
    #[arg(id = "chunk_sleep", long = "chunk-sleep", value_name = "FORM", value_parser = form)]
    form: Option<SleepForm>,

    /// Host memory for sleeping documents, in MiB. Default: as much as is reserved for documents on the
    /// device.
    #[arg(id = "chunk_sleep_memory", long = "chunk-sleep-memory", value_name = "MIB", requires = "chunk_sleep", value_parser = at_least_one)]
    memory: Option<usize>,

    /// When documents move: the share of the device's blocks in use above which the coldest documents go to host
    /// memory, the share of host memory above which the coldest ones leave it, and the heat above which a document
    /// comes back before a prompt asks for it. Two uses within four minutes make a heat above 0.7.
    #[arg(
        id = "chunk_sleep_thresholds",
        long = "chunk-sleep-thresholds",
        value_name = "DEVICE,HOST,HEAT",
        requires = "chunk_sleep",
        default_value = "0.85,0.90,0.70"
    )]
    thresholds: TierThresholds,
}

impl SleepArgs {
    /// Returns the form in which documents sleep, or `None` if they do not sleep.
    pub(crate) fn form(&self) -> Option<SleepForm> {
        self.form
    }

    /// Returns the engine's setting, or `None` if documents do not sleep.
    pub(crate) fn config(&self) -> Option<ChunkSleep> {
        let memory = self.memory.map(|mib| mib.saturating_mul(1 << 20));
        self.form.map(|form| ChunkSleep { form, memory, thresholds: self.thresholds })
    }
}

fn form(text: &str) -> Result<SleepForm, String> {
    text.parse().map_err(|error: kvchunk::Error| error.to_string())
}
