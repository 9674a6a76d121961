//! Threads of candle, which computes the small steps of a model on the host.

const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Keeps candle to the calling thread, unless the environment says otherwise: the products of matrices have threads of their own, and
/// candle's, which look for work long after a step, take the cores from them.
pub(crate) fn settle() {
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: `main` calls this before another thread exists that could read or write the environment; reading the command
        // line starts none.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}
