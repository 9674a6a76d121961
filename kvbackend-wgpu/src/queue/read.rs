//! Reads: copies of bytes to the host through a staging buffer.

use wgpu::{Buffer, BufferUsages, MapMode};

use super::Queue;
use kvcore::Result;

/// The maximum number of bytes per piece of a read.
const STAGING: u64 = 32 << 20;

impl Queue {
    /// Reads `dst.len()` bytes of a buffer, starting at byte `start`. The read runs after all work recorded
    /// so far.
    pub(crate) fn read(&self, buffer: &Buffer, start: u64, dst: &mut [u8]) -> Result<()> {
        for (i, piece) in dst.chunks_mut(STAGING as usize).enumerate() {
            self.read_piece(buffer, start + i as u64 * STAGING, piece)?;
        }
        Ok(())
    }

    /// Reads one piece of at most [`STAGING`] bytes.
    fn read_piece(&self, buffer: &Buffer, start: u64, dst: &mut [u8]) -> Result<()> {
        let device = &self.device;
        let (first, end) = (start - start % 4, (start + dst.len() as u64).next_multiple_of(4));
        let size = end - first;
        let (staging, submission) = {
            let mut pending = self.pending.lock();
            let staging = if let Some(kept) = pending.staging.take().filter(|kept| kept.size() >= size) {
                kept
            } else {
                let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
                device.buffer("staging", size.next_power_of_two().max(4096), usage)?
            };
            pending.encoder(device).copy_buffer_to_buffer(buffer, first, &staging, 0, Some(size));
            pending.submit(device);
            pending.check(device)?;
            (staging, pending.last())
        };
        let (sender, mapped) = std::sync::mpsc::channel();
        staging.slice(..size).map_async(MapMode::Read, move |result| {
            let _ = sender.send(result);
        });
        if let Some(submission) = submission {
            device.wait(submission)?;
        }
        mapped
            .recv()
            .map_err(|error| device.refusal(error.to_string()))?
            .map_err(|error| device.refusal(error.to_string()))?;
        {
            let view = staging.slice(..size).get_mapped_range();
            let view = view.map_err(|error| device.refusal(error.to_string()))?;
            let from = (start - first) as usize;
            dst.copy_from_slice(&view[from..from + dst.len()]);
        }
        staging.unmap();
        self.pending.lock().staging.get_or_insert(staging);
        Ok(())
    }
}
