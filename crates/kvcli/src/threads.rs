//! Number of threads for dense mathematics.

const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Sets the number of threads that multiply matrices: one per physical core, at most as many as this process
/// may use, unless the environment sets it already.
///
/// Without the variable, candle would ask the system at every product, which takes as long as a small product
/// and grows with the number of cores.
pub(crate) fn settle() {
    if std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let allowed = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = num_cpus::get_physical().clamp(1, allowed);
    // SAFETY: `main` calls this first, before another thread exists that could read or write the environment.
    unsafe { std::env::set_var(VARIABLE, threads.to_string()) };
}
