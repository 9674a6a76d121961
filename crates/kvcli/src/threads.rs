//! Threads of dense mathematics.

const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Says once how many threads multiply matrices: a physical core each, no more than this process may use, unless the
/// environment says so already. candle would ask the system at every product, which takes as long as a small product
/// and grows with the cores that there are.
pub(crate) fn settle() {
    if std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let allowed = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = num_cpus::get_physical().clamp(1, allowed);
    // SAFETY: called first in `main`, before there is another thread that could read the environment.
    unsafe { std::env::set_var(VARIABLE, threads.to_string()) };
}
