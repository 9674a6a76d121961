//! Number of threads for dense mathematics.

const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Sets the number of threads that multiply matrices: `asked`, or what the environment sets already, or one per physical core,
/// at most as many as this process may use.
///
/// Without the variable, candle would ask the system at every product, which takes as long as a small product
/// and grows with the number of cores.
pub(crate) fn settle(asked: Option<usize>) {
    if asked.is_none() && std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let allowed = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = asked.unwrap_or_else(|| num_cpus::get_physical().clamp(1, allowed));
    // SAFETY: `main` calls this before another thread exists that could read or write the environment; reading the command
    // line starts none.
    unsafe { std::env::set_var(VARIABLE, threads.to_string()) };
}
