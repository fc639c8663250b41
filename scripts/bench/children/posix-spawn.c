/* posix-spawn SECONDS CONCURRENCY: starts /bin/true again and again, CONCURRENCY at a time, and prints how many ended per
 * second: the limit of the machine. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int main(int count, char **words)
{
    if (count != 3) return 2;
    double seconds = atof(words[1]);
    int concurrency = atoi(words[2]);
    char *command[] = {"/bin/true", NULL};
    char *environment[] = {"PATH=/usr/bin:/bin", NULL};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);

    double start = now();
    int running = 0;
    long ended = 0;
    while (now() - start < seconds || running > 0) {
        while (running < concurrency && now() - start < seconds) {
            pid_t process;
            if (posix_spawn(&process, command[0], &actions, NULL, command, environment) != 0) return 1;
            running++;
        }
        if (running > 0 && wait(NULL) > 0) {
            running--;
            ended++;
        }
    }
    printf("%f\n", ended / (now() - start));
    return 0;
}
