// `temper top RUN`: the live view of a run that somebody else supervises.
#pragma once

namespace temper::job {

// One panel, redrawn on a terminal until the run ends or Ctrl-C. Exit code 0; 1 where the run says that it is running and nobody
// holds it any more: its supervisor was killed; 2 bad arguments or no run.
int Top(int argc, char** argv);

}  // namespace temper::job
