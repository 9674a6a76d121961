//! The page of the server: one static file, and the data that it shows.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::{IntoResponse as _, Response};

use crate::dialect::openai::respond;
use crate::service::Service;
use crate::text_work;

mod overview;
mod recent;
mod registered;

use overview::Overview;
pub(crate) use recent::{RecentRequest, RecentRequests};
use registered::Registered;

const PAGE: &str = include_str!("index.html");

/// Nothing is loaded from elsewhere, and no other page may show this one.
const POLICY: &str = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
                      frame-ancestors 'none'";

/// Returns the page. It contains no data, and therefore needs no key.
pub(crate) async fn page() -> Response {
    ([(CONTENT_TYPE, "text/html; charset=utf-8"), (CONTENT_SECURITY_POLICY, POLICY)], PAGE).into_response()
}

/// Returns what the page shows: pools, tiers, totals, registered documents and the last requests of all tenants.
pub(crate) async fn overview(State(service): State<Arc<Service>>, request: Request) -> Response {
    let overview = async {
        service.check_operator(&request.into_parts().0)?;
        let caches = service.engine.call(|engine| overview::Caches::of(engine)).await?;
        let handle = Arc::clone(&service);
        let (registered, ()) = text_work::run((), move || Ok(Registered::of(&handle))).await?;
        Ok(Json(Overview::new(&service, caches, registered)).into_response())
    };
    respond(overview.await)
}
